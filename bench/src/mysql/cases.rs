//! The cases on MySQL.
use super::session::{self, run, stay_idle};
use super::template::series;
use crate::cases::{joined, onset, Actor, Case, Expect, Limits, Noise, NoiseReport, Role, Timing};
use crate::clock::now_ns;
use crate::host::{setting, Dataset, HostId, Setting};
use crate::load::Load;
use anyhow::Result;
use mysql::Conn;
use std::sync::mpsc;
use std::time::Duration;

const TABLES: u32 = 20;
const ROWS: u32 = 4000;
/// c2's tables: the last one is moved to, and is large enough that the load does not get in its own way there.
const C2_TABLES: u32 = 24;
const C2_ROWS: u32 = 10_000;
/// What c2's UPDATE goes on to, while it holds the rows of the load.
const C2_EXTRA_ROWS: u32 = 400_000;
/// c1's UPDATEs take 10 ms for a row: 9 s and 13 s.
const C1_ROWS: [u32; 2] = [900, 1300];
/// How long the culprits without work of their own (idle, thinking) stay when nobody ends them.
const CULPRIT_HOLD: Duration = Duration::from_secs(10);
/// No wait of the noise may outlive this, whatever goes wrong.
const NOISE_TIMEOUTS: &str = "SET lock_wait_timeout = 120, innodb_lock_wait_timeout = 120, max_execution_time = 120000";

fn load(threads: u32, tables: u32, rows: u32) -> Load {
    Load::oltp(session::DATABASE, threads, tables, rows)
}

fn oltp() -> Dataset {
    Dataset::oltp(session::DATABASE, TABLES, ROWS)
}

fn c1_data() -> Dataset {
    let sql = ["noise_a", "noise_b"].iter().zip(C1_ROWS).flat_map(|(name, rows)| noise_table(name, rows)).collect();
    Dataset { sql, ..oltp() }
}

fn c2_data() -> Dataset {
    let data = Dataset::oltp(session::DATABASE, C2_TABLES, C2_ROWS);
    Dataset { extra_rows: C2_EXTRA_ROWS, extra_table: C2_TABLES, ..data }
}

fn x3_data() -> Dataset {
    Dataset {
        schemas: vec!["group_a", "group_b"],
        sql: noise_table("noise_c", 2_000),
        ..Dataset::oltp(session::DATABASE, 8, ROWS)
    }
}

fn x9_data() -> Dataset {
    Dataset { extra_rows: 200_000, ..Dataset::oltp(session::DATABASE, 4, ROWS) }
}

fn noise_table(name: &str, rows: u32) -> Vec<String> {
    vec![
        format!("CREATE TABLE {name} (id INT PRIMARY KEY, n INT NOT NULL, pad CHAR(100) NOT NULL)"),
        format!("INSERT INTO {name} {} SELECT i, 0, REPEAT('x', 100) FROM series", series(rows)),
    ]
}

fn victims() -> Vec<Load> {
    vec![load(16, TABLES, ROWS).evenly()]
}

fn c2_loads() -> Vec<Load> {
    vec![Load { moves: true, ..load(16, C2_TABLES, C2_ROWS).evenly() }]
}

fn x3_loads() -> Vec<Load> {
    let group = |schema| Load { schema, ..load(8, 8, ROWS) };
    // Group B's rows are few and hot: row-lock waits among its own members are its normal day.
    let hot = ["--rand-type=pareto", "--rand-pareto-h=0.1"].map(String::from).to_vec();
    vec![group("group_a").evenly(), Load { options: hot, ..group("group_b") }]
}

fn x5_loads() -> Vec<Load> {
    // Twice the clients that 2 cores can serve, on hot rows: row locks, deadlocks and queues as a busy day has them.
    let hot = ["--rand-type=pareto", "--rand-pareto-h=0.2"].map(String::from).to_vec();
    vec![Load { options: hot, ..load(32, TABLES, ROWS) }]
}

fn x9_loads() -> Vec<Load> {
    vec![load(16, 4, ROWS).evenly()]
}

fn plain() -> Vec<Setting> {
    vec![]
}

fn ends_idle() -> Vec<Setting> {
    // The vanilla server does not know it.
    vec![setting("loose_atropos_terminate_idle_in_transaction", "ON")]
}

const STANDARD: Timing = Timing { warmup_s: 6.0, quiet_s: 4.0, after_s: 20.0 };
const LIMITS: Limits = Limits { first_cancel_ms: 500.0, tps_ratio: 0.97, p99_ratio: 1.10 };

pub static CASES: &[Case] = &[
    Case {
        host: HostId::Mysql,
        id: "c1",
        title: "a backup's FLUSH TABLES WITH READ LOCK waits for two long UPDATEs, every writer waits for the backup",
        stands_for: "the paper's c1; MySQL manual, \"FLUSH TABLES WITH READ LOCK\": it waits for running statements",
        dataset: c1_data,
        loads: victims,
        settings: plain,
        timing: STANDARD,
        noise: Some(backup),
        expect: Expect::Culprits { stall_s: 8.0, limits: Some(LIMITS) },
    },
    Case {
        host: HostId::Mysql,
        id: "c2",
        title: "everyone turns to a table whose rows a long UPDATE locks",
        stands_for: "the paper's c2; MySQL manual, \"Locks Set by Different SQL Statements in InnoDB\": UPDATE locks \
                     every row it examines until its transaction ends",
        dataset: c2_data,
        loads: c2_loads,
        settings: plain,
        timing: STANDARD,
        noise: Some(long_update),
        expect: Expect::Culprits { stall_s: 4.0, limits: Some(LIMITS) },
    },
    Case {
        host: HostId::Mysql,
        id: "x1",
        title: "idle in transaction: a session holds row locks and sends nothing",
        stands_for: "MySQL manual, \"InnoDB Error Handling\" and innodb_lock_wait_timeout: the holder is found by hand",
        dataset: oltp,
        loads: victims,
        settings: ends_idle,
        timing: STANDARD,
        noise: Some(idle_in_transaction),
        expect: Expect::Culprits { stall_s: 8.0, limits: None },
    },
    Case {
        host: HostId::Mysql,
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
        host: HostId::Mysql,
        id: "x5",
        title: "busy but clean: saturation with row conflicts, deadlocks and no culprit",
        stands_for: "ours: no published work states its false cancels",
        dataset: oltp,
        loads: x5_loads,
        settings: plain,
        timing: Timing { warmup_s: 10.0, quiet_s: 0.0, after_s: 60.0 },
        noise: None,
        expect: Expect::Nobody,
    },
    Case {
        host: HostId::Mysql,
        id: "x9",
        title: "a long report reads a table, an ALTER waits behind it, everyone waits behind the ALTER",
        stands_for: "MySQL manual, \"Metadata Locking\": a pending exclusive lock bars later readers and writers",
        dataset: x9_data,
        loads: x9_loads,
        settings: plain,
        timing: STANDARD,
        noise: Some(queued_ddl),
        expect: Expect::Culprits { stall_s: 6.0, limits: None },
    },
];

/// A session of the noise that is still running.
struct Session {
    client: Conn,
    actor: Actor,
}

impl Session {
    fn open(noise: &Noise, role: Role, what: &'static str) -> Result<Session> {
        let mut client = session::connect(noise.socket_dir)?;
        run(&mut client, NOISE_TIMEOUTS)?;
        let (key, now) = (client.connection_id().into(), now_ns());
        Ok(Session { client, actor: Actor { role, what, key, started_ns: now, ended_ns: now, failure: None } })
    }

    /// Runs `work`; what the server says against it is the actor's outcome, not an error of the bench.
    fn run(mut self, work: impl FnOnce(&mut Conn) -> Result<(), mysql::Error>) -> Actor {
        self.actor.failure = work(&mut self.client).err().map(|e| session::failure(&e));
        self.actor.ended_ns = now_ns();
        self.actor
    }
}

/// Statements one after the other; the first that fails ends it.
fn all(client: &mut Conn, statements: &[&str]) -> Result<(), mysql::Error> {
    statements.iter().try_for_each(|sql| run(client, sql))
}

/// c1. The UPDATEs are long because each row waits, as for a slow disk, and not by using a core: CPU would be a
/// contention of its own, and after the cancel they go on beside the victims. Nobody but the backup bars anyone: their
/// rows are their own, and when it goes nothing is lost.
fn backup(noise: &Noise) -> Result<NoiseReport> {
    let first = Session::open(noise, Role::Bystander, "long UPDATE")?;
    let second = Session::open(noise, Role::Bystander, "longer UPDATE")?;
    let backup = Session::open(noise, Role::Culprit, "FLUSH TABLES WITH READ LOCK")?;
    let update = |session: Session, table: &'static str| {
        session.run(|c| run(c, format!("UPDATE {table} SET n = n + 1 WHERE SLEEP(0.01) = 0")))
    };
    std::thread::scope(|s| {
        let first = s.spawn(move || update(first, "noise_a"));
        std::thread::sleep(Duration::from_secs(1));
        let second = s.spawn(move || update(second, "noise_b"));
        std::thread::sleep(Duration::from_secs(1));
        // It waits from here on for the UPDATEs, and whoever wants to write waits for it. When it is granted, the
        // backup takes 2 s.
        let onset_ns = now_ns();
        let backup = backup.run(|c| all(c, &["FLUSH TABLES WITH READ LOCK", "DO SLEEP(2)", "UNLOCK TABLES"]));
        Ok(NoiseReport { onset_ns, actors: vec![backup, joined(first, "UPDATE")?, joined(second, "UPDATE")?] })
    })
}

/// c2. One statement, committed by itself: when it is cancelled, the server undoes it and lets its rows go.
fn long_update(noise: &Noise) -> Result<NoiseReport> {
    let culprit = Session::open(noise, Role::Culprit, "long UPDATE")?;
    let onset_ns = now_ns();
    let actor = culprit
        .run(|c| run(c, format!("UPDATE sbtest{C2_TABLES} SET k = k + 1, c = CONCAT(SHA2(c, 224), SHA2(pad, 224))")));
    Ok(NoiseReport { onset_ns, actors: vec![actor] })
}

/// x1. It locks without a change: an UPDATE of all rows took 400 ms on a slow disk, and was rightly told to stop before it
/// could sit idle.
fn idle_in_transaction(noise: &Noise) -> Result<NoiseReport> {
    let culprit = Session::open(noise, Role::Culprit, "idle in transaction")?;
    let (granted, at) = mpsc::channel();
    let (onset_ns, actor) = onset(&at, "the idle session", || {
        Ok(culprit.run(move |c| {
            all(c, &["BEGIN", "SELECT COUNT(*) FROM sbtest1 FORCE INDEX (PRIMARY) FOR UPDATE"])?;
            let _ = granted.send(now_ns());
            stay_idle(c, CULPRIT_HOLD)?;
            run(c, "COMMIT")
        }))
    })?;
    Ok(NoiseReport { onset_ns, actors: vec![actor] })
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
                all(c, &["LOCK TABLES noise_c WRITE", "UPDATE noise_c SET n = n + 1"])?;
                let _ = c_held.send(());
                stay_idle(c, lasts.mul_f64(0.8))?;
                run(c, "UNLOCK TABLES")
            })
        });
        let heavy: Vec<_> = heavy
            .into_iter()
            .map(|session| {
                s.spawn(move || {
                    session.run(move |c| {
                        let until = now_ns() + lasts.mul_f64(0.8).as_nanos() as i64;
                        while now_ns() < until {
                            // One row lock each time, held for 20 ms: others wait for it, shortly.
                            let row = "UPDATE group_b.sbtest1 SET k = k + 1 WHERE id = 7";
                            all(c, &["BEGIN", row, "DO SLEEP(0.02)", "COMMIT"])?;
                        }
                        Ok(())
                    })
                })
            })
            .collect();
        let _ = c_is_held.recv();
        std::thread::sleep(Duration::from_secs(1));
        let (onset_ns, a) = onset(&at, "the holder of A", || {
            Ok(culprit.run(move |c| {
                run(c, "LOCK TABLES group_a.sbtest1 WRITE")?;
                let _ = granted.send(now_ns());
                // 10 s for about 1,000 rows.
                run(c, "SELECT COUNT(*) FROM group_a.sbtest1 WHERE id <= 1000 AND SLEEP(0.01) = 0")?;
                run(c, "UNLOCK TABLES")
            }))
        })?;
        let mut actors = vec![a, joined(c, "C")?];
        for h in heavy {
            actors.push(joined(h, "B")?);
        }
        Ok(NoiseReport { onset_ns, actors })
    })
}

/// x9. The report is real work on the table; the ALTER itself would take milliseconds.
fn queued_ddl(noise: &Noise) -> Result<NoiseReport> {
    let report = Session::open(noise, Role::Bystander, "report")?;
    let alter = Session::open(noise, Role::Culprit, "ALTER TABLE")?;
    std::thread::scope(|s| {
        let r = s.spawn(move || {
            report.run(|c| {
                // A transaction that reads the table in several statements, as reports do: its metadata lock on the
                // table stays until its end, and the work goes on for 10 s.
                run(c, "START TRANSACTION WITH CONSISTENT SNAPSHOT")?;
                let until = now_ns() + CULPRIT_HOLD.as_nanos() as i64;
                while now_ns() < until {
                    run(c, "SELECT COUNT(DISTINCT SHA2(CONCAT(c, pad), 224)), SUM(k) FROM sbtest1 WHERE id > 4000")?;
                }
                run(c, "COMMIT")
            })
        });
        std::thread::sleep(Duration::from_millis(500));
        // It waits from here on, and whoever comes later waits behind it.
        let onset_ns = now_ns();
        let a = alter.run(|c| run(c, "ALTER TABLE sbtest1 ADD COLUMN note TEXT"));
        Ok(NoiseReport { onset_ns, actors: vec![a, joined(r, "report")?] })
    })
}
