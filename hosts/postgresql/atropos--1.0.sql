-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION atropos" to load this file. \quit

CREATE FUNCTION atropos_status() RETURNS json
    AS 'MODULE_PATHNAME', 'atropos_pg_status' LANGUAGE C STRICT VOLATILE PARALLEL RESTRICTED;
COMMENT ON FUNCTION atropos_status() IS 'counters, state, resources and tasks of Atropos, now';

CREATE FUNCTION atropos_decisions() RETURNS SETOF json
    AS 'MODULE_PATHNAME', 'atropos_pg_decisions' LANGUAGE C STRICT VOLATILE PARALLEL RESTRICTED;
COMMENT ON FUNCTION atropos_decisions() IS 'the recorded decisions of Atropos, oldest first';

REVOKE ALL ON FUNCTION atropos_status(), atropos_decisions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION atropos_status(), atropos_decisions() TO pg_monitor;
