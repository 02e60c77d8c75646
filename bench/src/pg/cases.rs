//! The cases on PostgreSQL.
use super::session::{self, stay_idle};
use crate::cases::{joined, onset, Actor, Case, Expect, Limits, Noise, NoiseReport, Role, Timing};
use crate::clock::now_ns;
use crate::host::{setting, Dataset, HostId, Setting};
use crate::load::Load;
use anyhow::{bail, Result};
use postgres::Client;
use std::sync::mpsc;
use std::time::Duration;

const TABLES: u32 = 25;
const ROWS: u32 = 4000;
/// What c6's culprit rewrites: 4 to 10 s for one pass, by the machine.
const C6_EXTRA_ROWS: u32 = 500_000;
/// Writers of n1, all alike, each with a table of its own.
const N1_WRITERS: u32 = 6;
/// How long the culprits without work of their own (idle, thinking) stay when nobody ends them.
const CULPRIT_HOLD: Duration = Duration::from_secs(10);
/// No statement of the noise may outlive this, whatever goes wrong.
const NOISE_STATEMENT_TIMEOUT: &str = "SET statement_timeout = '120s'";

fn load(threads: u32, tables: u32, rows: u32) -> Load {
    Load::oltp(session::SCHEMA, threads, tables, rows)
}

fn oltp() -> Dataset {
    Dataset::oltp(session::SCHEMA, TABLES, ROWS)
}

fn c6_data() -> Dataset {
    Dataset { extra_rows: C6_EXTRA_ROWS, ..oltp() }
}

fn x3_data() -> Dataset {
    Dataset {
        schemas: vec!["group_a", "group_b"],
        sql: vec![noise_table("noise_c", 20_000)],
        ..Dataset::oltp(session::SCHEMA, 8, ROWS)
    }
}

fn x4_data() -> Dataset {
    Dataset { sql: vec![noise_table("noise_c", 20_000)], ..oltp() }
}

fn n1_data() -> Dataset {
    Dataset { sql: (1..=N1_WRITERS).map(|i| noise_table(&format!("noise_w{i}"), 20_000)).collect(), ..oltp() }
}

fn x9_data() -> Dataset {
    Dataset { extra_rows: 200_000, ..Dataset::oltp(session::SCHEMA, 4, ROWS) }
}

fn noise_table(name: &str, rows: u32) -> String {
    format!("CREATE TABLE public.{name} AS SELECT i AS id, 0 AS n, repeat('x', 100) AS pad FROM generate_series(1, {rows}) i")
}

fn victims() -> Vec<Load> {
    vec![load(16, TABLES, ROWS).evenly()]
}

fn x3_loads() -> Vec<Load> {
    let group = |schema| Load { schema, ..load(8, 8, ROWS) };
    // Group B's rows are few and hot: row-lock waits among its own members are its normal day.
    let hot = Load { options: vec!["--rand-type=pareto".into(), "--rand-pareto-h=0.1".into()], ..group("group_b") };
    vec![group("group_a").evenly(), hot]
}

fn x5_loads() -> Vec<Load> {
    // Twice the clients that 2 cores can serve, on hot rows: row locks, deadlocks and queues as a busy day has them.
    let hot = vec!["--rand-type=pareto".to_owned(), "--rand-pareto-h=0.2".to_owned()];
    vec![Load { options: hot, ..load(32, TABLES, ROWS) }]
}

fn x9_loads() -> Vec<Load> {
    vec![load(16, 4, ROWS).evenly()]
}

fn n1_loads() -> Vec<Load> {
    // Everybody writes wide and much: the flush storm has no single author.
    let heavy = [
        "--rand-type=uniform",
        "--index-updates=4",
        "--non-index-updates=8",
        "--delete-inserts=4",
        "--point-selects=2",
    ]
    .map(String::from)
    .to_vec();
    vec![Load { options: heavy, ..load(16, TABLES, ROWS) }]
}

fn plain() -> Vec<Setting> {
    vec![]
}

fn storm_settings() -> Vec<Setting> {
    vec![
        setting("shared_buffers", "'48MB'"),
        setting("max_wal_size", "'64MB'"),
        setting("min_wal_size", "'32MB'"),
        setting("checkpoint_completion_target", "0.05"),
        setting("checkpoint_flush_after", "0"),
        setting("bgwriter_lru_maxpages", "0"),
        setting("wal_buffers", "'256kB'"),
    ]
}

const STANDARD: Timing = Timing { warmup_s: 10.0, quiet_s: 10.0, after_s: 22.0 };

pub static CASES: &[Case] = &[
    Case {
        host: HostId::Postgresql,
        id: "c6",
        title: "a bulk UPDATE under LOCK TABLE … IN EXCLUSIVE MODE stops every writer",
        stands_for:
            "the paper's c6; PostgreSQL documentation, \"Explicit Locking\": EXCLUSIVE conflicts with every writer",
        dataset: c6_data,
        loads: victims,
        settings: plain,
        timing: STANDARD,
        noise: Some(bulk_update),
        expect: Expect::Culprits {
            stall_s: 8.0,
            limits: Some(Limits { first_cancel_ms: 500.0, tps_ratio: 0.97, p99_ratio: 1.10 }),
        },
    },
    Case {
        host: HostId::Postgresql,
        id: "x1",
        title: "idle in transaction: a session holds a lock and sends nothing",
        stands_for: "PostgreSQL documentation, idle_in_transaction_session_timeout: held locks block other sessions",
        dataset: oltp,
        loads: victims,
        settings: plain,
        timing: STANDARD,
        noise: Some(idle_in_transaction),
        expect: Expect::Culprits { stall_s: 8.0, limits: None },
    },
    Case {
        host: HostId::Postgresql,
        id: "x3",
        title: "two groups: the holder of table A is never blamed for waits on B, nor a harmless long holder of C",
        stands_for: "ours: blame by table, not by who holds most",
        dataset: x3_data,
        loads: x3_loads,
        settings: plain,
        timing: STANDARD,
        noise: Some(two_tables),
        // Group B goes on, so throughput falls, but not under half for sure.
        expect: Expect::Culprits { stall_s: 0.0, limits: None },
    },
    Case {
        host: HostId::Postgresql,
        id: "x4",
        title: "a chain: everyone waits for B, B waits for C, so C is the culprit",
        stands_for: "ours: pg_blocking_pids names B to everyone, but B only waits itself",
        dataset: x4_data,
        loads: victims,
        settings: plain,
        timing: STANDARD,
        noise: Some(chain),
        expect: Expect::Culprits { stall_s: 8.0, limits: None },
    },
    Case {
        host: HostId::Postgresql,
        id: "x5",
        title: "busy but clean: saturation with row conflicts and no culprit",
        stands_for: "ours: no published work states its false cancels",
        dataset: oltp,
        loads: x5_loads,
        settings: plain,
        timing: Timing { warmup_s: 10.0, quiet_s: 0.0, after_s: 60.0 },
        noise: None,
        expect: Expect::Nobody,
    },
    Case {
        host: HostId::Postgresql,
        id: "x9",
        title: "a long report reads a table, an ALTER waits behind it, everyone waits behind the ALTER",
        stands_for: "netdata.cloud guide \"PostgreSQL ALTER TABLE blocked\"; monpg.app \"PostgreSQL lock queues\"",
        dataset: x9_data,
        loads: x9_loads,
        settings: plain,
        timing: STANDARD,
        noise: Some(queued_ddl),
        expect: Expect::Culprits { stall_s: 6.0, limits: None },
    },
    Case {
        host: HostId::Postgresql,
        id: "n1",
        title: "checkpoint and flush storm: everyone stalls on I/O and nobody is to blame",
        stands_for: "the well-known checkpoint spikes (PostgreSQL documentation, \"WAL Configuration\")",
        dataset: n1_data,
        loads: n1_loads,
        settings: storm_settings,
        timing: STANDARD,
        noise: Some(checkpoint_storm),
        expect: Expect::Nobody,
    },
    Case {
        host: HostId::Postgresql,
        id: "n2",
        title: "forty equal heavy queries saturate the CPU",
        stands_for: "ours: a regular overload, for admission control and not for cancelling",
        dataset: oltp,
        loads: victims,
        settings: plain,
        timing: STANDARD,
        noise: Some(equal_queries),
        expect: Expect::Nobody,
    },
];

/// A session of the noise that is still running.
struct Session {
    client: Client,
    actor: Actor,
}

impl Session {
    fn open(noise: &Noise, role: Role, what: &'static str) -> Result<Session> {
        let mut client = session::connect(noise.socket_dir, what)?;
        client.batch_execute(NOISE_STATEMENT_TIMEOUT)?;
        let key = session::backend_pid(&mut client)?.into();
        let now = now_ns();
        Ok(Session { client, actor: Actor { role, what, key, started_ns: now, ended_ns: now, failure: None } })
    }

    /// Runs `work`; what the server says against it is the actor's outcome, not an error of the bench.
    fn run(mut self, work: impl FnOnce(&mut Client) -> Result<(), postgres::Error>) -> Actor {
        self.actor.failure = work(&mut self.client).err().map(|e| session::failure(&e));
        self.actor.ended_ns = now_ns();
        self.actor
    }
}

/// c6. Every row of the table gets a new, wider version, through both indexes; on a machine that is through with it
/// sooner, further parts follow in the same transaction until about 10 s have passed.
fn bulk_update(noise: &Noise) -> Result<NoiseReport> {
    let culprit = Session::open(noise, Role::Culprit, "bulk update")?;
    let (granted, at) = mpsc::channel();
    let (onset_ns, actor) = onset(&at, "the bulk update", || {
        Ok(culprit.run(move |c| {
            c.batch_execute("BEGIN; LOCK TABLE sbtest1 IN EXCLUSIVE MODE")?;
            let _ = granted.send(now_ns());
            let until = now_ns() + CULPRIT_HOLD.as_nanos() as i64;
            c.batch_execute("UPDATE sbtest1 SET k = k + 1, c = md5(c) || md5(pad)")?;
            let part = C6_EXTRA_ROWS / 20;
            for from in (ROWS..).step_by(part as usize).take_while(|_| now_ns() < until) {
                let from = ROWS + (from - ROWS) % C6_EXTRA_ROWS;
                c.batch_execute(&format!(
                    "UPDATE sbtest1 SET k = k + 1, c = md5(c) || md5(pad) WHERE id > {from} AND id <= {from} + {part}"
                ))?;
            }
            c.batch_execute("COMMIT")
        }))
    })?;
    Ok(NoiseReport { onset_ns, actors: vec![actor] })
}

/// x1.
fn idle_in_transaction(noise: &Noise) -> Result<NoiseReport> {
    let culprit = Session::open(noise, Role::Culprit, "idle in transaction")?;
    let (granted, at) = mpsc::channel();
    let (onset_ns, actor) = onset(&at, "the idle session", || {
        Ok(culprit.run(move |c| {
            c.batch_execute("BEGIN; LOCK TABLE sbtest1 IN EXCLUSIVE MODE; UPDATE sbtest1 SET k = k + 1 WHERE id = 1")?;
            let _ = granted.send(now_ns());
            stay_idle(c, CULPRIT_HOLD)?;
            c.batch_execute("COMMIT")
        }))
    })?;
    Ok(NoiseReport { onset_ns, actors: vec![actor] })
}

/// A statement that keeps one core busy for about `seconds` and touches no table.
fn burn(seconds: f64) -> String {
    // The clock bounds it whatever the machine; 500 rows of work between looks at the clock.
    format!(
        "DO $$ DECLARE until timestamptz := clock_timestamp() + interval '{seconds} seconds'; n bigint;
         BEGIN WHILE clock_timestamp() < until LOOP
           SELECT count(md5(i::text)) INTO n FROM generate_series(1, 500) i;
         END LOOP; END $$"
    )
}

/// x3. Three holders at once: of C (nobody wants it), of A (group A waits: the culprit), and short ones in B.
fn two_tables(noise: &Noise) -> Result<NoiseReport> {
    let harmless = Session::open(noise, Role::Bystander, "harmless holder of C")?;
    let culprit = Session::open(noise, Role::Culprit, "holder of A")?;
    let heavy: Vec<_> =
        (0..2).map(|_| Session::open(noise, Role::Bystander, "heavy user of B")).collect::<Result<_>>()?;
    let (granted, at) = mpsc::channel();
    let lasts = noise.lasts;
    std::thread::scope(|s| {
        let (c_held, c_is_held) = mpsc::channel();
        // It holds longer than anyone, before and after the culprit.
        let c = s.spawn(move || {
            harmless.run(move |c| {
                c.batch_execute(
                    "BEGIN; LOCK TABLE public.noise_c IN ACCESS EXCLUSIVE MODE; UPDATE public.noise_c SET n = n + 1",
                )?;
                let _ = c_held.send(());
                stay_idle(c, lasts.mul_f64(0.8))?;
                c.batch_execute("COMMIT")
            })
        });
        let heavy: Vec<_> = heavy
            .into_iter()
            .map(|session| {
                s.spawn(move || {
                    session.run(move |c| {
                        let until = now_ns() + lasts.mul_f64(0.8).as_nanos() as i64;
                        while now_ns() < until {
                            // One row lock each time, held through 20 ms of work: others wait for it, shortly.
                            c.batch_execute("BEGIN; UPDATE group_b.sbtest1 SET k = k + 1 WHERE id = 7")?;
                            c.batch_execute(&burn(0.02))?;
                            c.batch_execute("COMMIT")?;
                        }
                        Ok(())
                    })
                })
            })
            .collect();
        let _ = c_is_held.recv();
        std::thread::sleep(Duration::from_secs(2));
        let (onset_ns, a) = onset(&at, "the holder of A", || {
            Ok(culprit.run(move |c| {
                c.batch_execute("BEGIN; LOCK TABLE group_a.sbtest1 IN EXCLUSIVE MODE")?;
                let _ = granted.send(now_ns());
                c.batch_execute(&burn(CULPRIT_HOLD.as_secs_f64()))?;
                c.batch_execute("COMMIT")
            }))
        })?;
        let mut actors = vec![a, joined(c, "C")?];
        for h in heavy {
            actors.push(joined(h, "B")?);
        }
        Ok(NoiseReport { onset_ns, actors })
    })
}

/// x4. C works on a table of its own; B locks what everyone needs and then wants C's table.
fn chain(noise: &Noise) -> Result<NoiseReport> {
    let head = Session::open(noise, Role::Culprit, "C, head of the chain")?;
    let middle = Session::open(noise, Role::Bystander, "B, middle of the chain")?;
    std::thread::scope(|s| {
        let (c_held, c_is_held) = mpsc::channel();
        let c = s.spawn(move || {
            head.run(move |c| {
                c.batch_execute("BEGIN; LOCK TABLE noise_c IN EXCLUSIVE MODE; UPDATE noise_c SET n = n + 1")?;
                let _ = c_held.send(());
                // One second more than the hold: B comes a moment later.
                c.batch_execute(&burn(CULPRIT_HOLD.as_secs_f64() + 1.0))?;
                c.batch_execute("COMMIT")
            })
        });
        if c_is_held.recv().is_err() {
            bail!("C was never granted its lock: {:?}", joined(c, "C")?.failure);
        }
        let (granted, at) = mpsc::channel();
        let (onset_ns, b) = onset(&at, "B", || {
            Ok(middle.run(move |c| {
                c.batch_execute("BEGIN; LOCK TABLE sbtest1 IN EXCLUSIVE MODE")?;
                let _ = granted.send(now_ns());
                c.batch_execute("UPDATE noise_c SET n = n + 1 WHERE id = 1")?;
                c.batch_execute("COMMIT")
            }))
        })?;
        Ok(NoiseReport { onset_ns, actors: vec![joined(c, "C")?, b] })
    })
}

/// x9. The report is real work on the table; the ALTER itself would take a millisecond.
fn queued_ddl(noise: &Noise) -> Result<NoiseReport> {
    let report = Session::open(noise, Role::Bystander, "report")?;
    let alter = Session::open(noise, Role::Culprit, "ALTER TABLE")?;
    std::thread::scope(|s| {
        let r = s.spawn(move || {
            report.run(|c| {
                // A transaction that reads the table in several statements, as reports do: the table's ACCESS SHARE
                // lock stays until its end, and the work goes on for 10 s.
                c.batch_execute(
                    "BEGIN ISOLATION LEVEL REPEATABLE READ; SET LOCAL max_parallel_workers_per_gather = 0",
                )?;
                let until = now_ns() + CULPRIT_HOLD.as_nanos() as i64;
                while now_ns() < until {
                    c.batch_execute("SELECT count(DISTINCT md5(c || pad)), sum(k) FROM sbtest1 WHERE id > 4000")?;
                }
                c.batch_execute("COMMIT")
            })
        });
        std::thread::sleep(Duration::from_millis(500));
        // It waits from here on, and whoever comes later waits behind it.
        let onset_ns = now_ns();
        let a = alter.run(|c| c.batch_execute("ALTER TABLE sbtest1 ADD COLUMN note text"));
        Ok(NoiseReport { onset_ns, actors: vec![a, joined(r, "report")?] })
    })
}

/// n1. CHECKPOINT without a pause and equal writers, so that every page's next change is logged whole again, on a
/// server whose settings make everyone write and flush.
fn checkpoint_storm(noise: &Noise) -> Result<NoiseReport> {
    let checkpoints = Session::open(noise, Role::Bystander, "checkpoint loop")?;
    let writers: Vec<_> =
        (0..N1_WRITERS).map(|_| Session::open(noise, Role::Bystander, "writer")).collect::<Result<_>>()?;
    let onset_ns = now_ns();
    let until = onset_ns + noise.lasts.as_nanos() as i64;
    let repeat = move |session: Session, sql: String| {
        session.run(|c| {
            while now_ns() < until {
                c.batch_execute(&sql)?;
            }
            Ok(())
        })
    };
    std::thread::scope(|s| {
        let mut running = vec![s.spawn(move || repeat(checkpoints, "CHECKPOINT".into()))];
        for (i, writer) in (1..).zip(writers) {
            running.push(s.spawn(move || repeat(writer, format!("UPDATE noise_w{i} SET n = n + 1"))));
        }
        let actors = running.into_iter().map(|h| joined(h, "storm")).collect::<Result<_>>()?;
        Ok(NoiseReport { onset_ns, actors })
    })
}

/// n2. Forty sessions that read and compute, all alike.
fn equal_queries(noise: &Noise) -> Result<NoiseReport> {
    let sessions: Vec<_> =
        (0..40).map(|_| Session::open(noise, Role::Bystander, "heavy query")).collect::<Result<_>>()?;
    let onset_ns = now_ns();
    let until = onset_ns + noise.lasts.as_nanos() as i64;
    std::thread::scope(|s| {
        let running: Vec<_> = sessions
            .into_iter()
            .enumerate()
            .map(|(i, session)| {
                s.spawn(move || {
                    session.run(|c| {
                        c.batch_execute("SET max_parallel_workers_per_gather = 0")?;
                        let query = format!(
                            "SELECT count(DISTINCT md5(a.c || b.n)) FROM sbtest{} a, generate_series(1, 15) b(n)",
                            i % 25 + 1
                        );
                        while now_ns() < until {
                            c.batch_execute(&query)?;
                        }
                        Ok(())
                    })
                })
            })
            .collect();
        let actors = running.into_iter().map(|h| joined(h, "query")).collect::<Result<_>>()?;
        Ok(NoiseReport { onset_ns, actors })
    })
}
