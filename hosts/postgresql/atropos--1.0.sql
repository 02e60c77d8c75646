-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION atropos" to load this file. \quit

CREATE FUNCTION atropos_status() RETURNS json
    AS 'MODULE_PATHNAME', 'atropos_pg_status' LANGUAGE C STRICT VOLATILE PARALLEL RESTRICTED;
COMMENT ON FUNCTION atropos_status() IS 'counters, state, resources and tasks of Atropos, now';

CREATE FUNCTION atropos_decisions() RETURNS SETOF json
    AS 'MODULE_PATHNAME', 'atropos_pg_decisions' LANGUAGE C STRICT VOLATILE PARALLEL RESTRICTED;
COMMENT ON FUNCTION atropos_decisions() IS 'the recorded decisions of Atropos, oldest first';

CREATE FUNCTION atropos_scope(pid int DEFAULT pg_backend_pid()) RETURNS bigint
    AS 'MODULE_PATHNAME', 'atropos_pg_scope' LANGUAGE C STRICT VOLATILE PARALLEL RESTRICTED;
COMMENT ON FUNCTION atropos_scope(int) IS 'number of the present, or last, statement of a session; NULL if it is not followed';

CREATE FUNCTION atropos_cancel(pid int, scope bigint DEFAULT 0) RETURNS boolean
    AS 'MODULE_PATHNAME', 'atropos_pg_cancel' LANGUAGE C STRICT VOLATILE PARALLEL RESTRICTED;
COMMENT ON FUNCTION atropos_cancel(int, bigint)
    IS 'asks to cancel exactly this statement of a session (0: the present one); false when it has passed';

-- Superusers only, whatever the members of pg_monitor may read.
REVOKE ALL ON FUNCTION atropos_scope(int), atropos_cancel(int, bigint) FROM PUBLIC;
REVOKE ALL ON FUNCTION atropos_status(), atropos_decisions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION atropos_status(), atropos_decisions() TO pg_monitor;

-- An instance of "pg relation lock" is the OID of its database and that of the relation, 32 bits each.
CREATE FUNCTION atropos_relation(resource text, instance numeric) RETURNS regclass
    LANGUAGE SQL STABLE PARALLEL RESTRICTED
    AS $$ SELECT CASE WHEN resource = 'pg relation lock'
                       AND div(instance, 4294967296) = (SELECT oid::int8 FROM pg_catalog.pg_database WHERE datname = current_database())
                 THEN mod(instance, 4294967296)::int8::oid::regclass END $$;
COMMENT ON FUNCTION atropos_relation(text, numeric) IS 'the relation a lock stands for; NULL for other locks and other databases';

CREATE VIEW atropos_decision AS
    SELECT (d->>'id')::int8 AS id,
           to_timestamp((d->>'wall_ms')::float8 / 1000) AS decided_at,
           d->>'mode' AS mode,
           d->>'result' AS result,
           (d->'task'->>'key')::int AS pid,
           d->'task'->>'label' AS session,
           d->'resource'->>'name' AS resource,
           atropos_relation(d->'resource'->>'name', (d->'resource'->>'instance')::numeric) AS relation,
           d->>'reason' AS reason,
           (d->>'acknowledged_ms')::float8 AS acknowledged_ms,
           (d->>'ended_ms')::float8 AS ended_ms,
           d AS evidence
      FROM atropos_decisions() AS d;
COMMENT ON VIEW atropos_decision IS 'what Atropos did, or in observe mode would have done, oldest first';

CREATE VIEW atropos_session AS
    SELECT (t->>'key')::int AS pid,
           t->>'label' AS session,
           (t->>'age_ms')::float8 AS statement_ms,
           (t->>'priority')::int AS priority,
           (t->>'background')::bool AS background,
           (t->>'protected')::bool AS protected,
           (t->>'cancellable')::bool AS cancellable,
           t->'holds' AS holds,
           t->'waits' AS waits
      FROM atropos_status() AS s, json_array_elements(s->'tasks') AS t;
COMMENT ON VIEW atropos_session IS 'the sessions Atropos follows, with the locks it saw them take';

REVOKE ALL ON atropos_decision, atropos_session FROM PUBLIC;
GRANT SELECT ON atropos_decision, atropos_session TO pg_monitor;
