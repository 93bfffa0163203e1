"""Settings of the recorder. Every bound has a name that ends in its unit."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic_settings import SettingsConfigDict

from dsec.platform.settings import Settings


class RecorderSettings(Settings):
    """Read from `DSEC_*` and `DSEC_RECORDER_*` variables."""

    model_config = SettingsConfigDict(populate_by_name=True)

    batch_messages_max: PositiveInt = Field(
        default=256, alias="DSEC_RECORDER_BATCH_MESSAGES_MAX", description="messages a commit"
    )
    batch_bytes_max: PositiveInt = Field(
        default=8 << 20,
        alias="DSEC_RECORDER_BATCH_BYTES_MAX",
        description="bytes a commit; one larger message is a batch of its own",
    )
    fetch_wait_s: PositiveFloat = Field(
        default=1.0, alias="DSEC_RECORDER_FETCH_WAIT_S", description="how long an idle fetch waits"
    )
    ack_wait_s: PositiveFloat = Field(
        default=60.0,
        alias="DSEC_RECORDER_ACK_WAIT_S",
        description="the server delivers again after this; what is committed is not written twice",
    )
    ack_pending_max: PositiveInt = Field(
        default=4096,
        alias="DSEC_RECORDER_ACK_PENDING_MAX",
        description="messages delivered and not committed; more than two batches",
    )
    stall_limit_s: PositiveFloat = Field(
        default=10.0,
        alias="DSEC_RECORDER_STALL_LIMIT_S",
        description="messages pending and none delivered for so long: the consumer is made anew",
    )
    commit_period_ms: float = Field(
        default=50.0,
        ge=0,
        alias="DSEC_RECORDER_COMMIT_PERIOD_MS",
        description="shortest time between two commits; more rows share the cost of one",
    )
    commit_period_ms_max: float = Field(
        default=250.0,
        ge=0,
        alias="DSEC_RECORDER_COMMIT_PERIOD_MS_MAX",
        description="longest time that a commit waits for more rows",
    )
    commit_share: float = Field(
        default=0.1,
        gt=0,
        le=1,
        alias="DSEC_RECORDER_COMMIT_SHARE",
        description="of the time that commits may take: where they would take more, they come less "
        "often, since most of what a commit costs is not its rows'",
    )

    def pause_s(self, commit_s: float) -> float:
        """How long after a commit that took `commit_s` seconds the next one may begin."""
        wanted_s = commit_s * (1 / self.commit_share - 1)
        return max(self.commit_period_ms, min(wanted_s * 1000, self.commit_period_ms_max)) / 1000

    standby_poll_s: PositiveFloat = Field(
        default=1.0,
        alias="DSEC_RECORDER_STANDBY_POLL_S",
        description="how often a standing-by recorder tries to take over",
    )
    retry_wait_s_max: PositiveFloat = Field(
        default=5.0,
        alias="DSEC_RECORDER_RETRY_WAIT_S_MAX",
        description="longest wait between attempts while the database or the bus is away",
    )
    data_attempts_max: PositiveInt = Field(
        default=3,
        alias="DSEC_RECORDER_DATA_ATTEMPTS_MAX",
        description="attempts at rows that the database refuses, before they are dead letters",
    )
    data_retry_wait_s: PositiveFloat = Field(
        default=0.1,
        alias="DSEC_RECORDER_DATA_RETRY_WAIT_S",
        description="wait before the second attempt, doubled for each further one",
    )
    partitions_max: PositiveInt = Field(
        default=240,
        alias="DSEC_RECORDER_PARTITIONS_MAX",
        description="monthly partitions; beyond them the default partition serves. A hypertable "
        "has chunks of 30 days, and no more than the ten years that session ids may carry need",
    )
    retention_days: PositiveInt | None = Field(
        default=None,
        alias="DSEC_RECORDER_RETENTION_DAYS",
        description="partitions (chunks) of the log that ended so long ago are "
        "dropped, unless a session in them is open. By default everything is kept",
    )
    heartbeat_write_s: PositiveFloat = Field(
        default=1.0,
        alias="DSEC_RECORDER_HEARTBEAT_WRITE_S",
        description="session_live is written at most so often",
    )
    live_keep_s: PositiveFloat = Field(
        default=60.0,
        alias="DSEC_RECORDER_LIVE_KEEP_S",
        description="rows of session_live without a heartbeat for so long are removed",
    )
    live_sessions_max: PositiveInt = Field(
        default=100_000,
        alias="DSEC_RECORDER_LIVE_SESSIONS_MAX",
        description="sessions kept between two writes of session_live; more are left out",
    )
    trim_period_s: PositiveFloat = Field(
        default=10.0, alias="DSEC_RECORDER_TRIM_PERIOD_S", description="how often it trims"
    )
    trim_keep_s: float = Field(
        default=180.0,
        ge=0,
        alias="DSEC_RECORDER_TRIM_KEEP_S",
        description="younger messages stay: a re-placed session's worker reads replies of the "
        "lane before it from a consumer that it has yet to make",
    )
    trim_hold_bytes_max: PositiveInt = Field(
        default=1 << 30,
        alias="DSEC_RECORDER_TRIM_HOLD_BYTES_MAX",
        description="a consumer that holds back more is reported and no longer waited for",
    )
    trim_placements_max: PositiveInt = Field(
        default=256,
        alias="DSEC_RECORDER_TRIM_PLACEMENTS_MAX",
        description="ended sessions whose placements one round of trimming removes",
    )
