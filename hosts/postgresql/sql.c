/*
 * Functions for SQL. SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "atropos_pg.h"

#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/tuplestore.h"

PG_FUNCTION_INFO_V1(atropos_pg_status);
PG_FUNCTION_INFO_V1(atropos_pg_decisions);
PG_FUNCTION_INFO_V1(atropos_pg_scope);
PG_FUNCTION_INFO_V1(atropos_pg_cancel);

static void
require_region(void)
{
	if (!atp_join_region())
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("Atropos does not run in this server"),
				 errhint("The messages at the start of the server tell why.")));
}

Datum
atropos_pg_status(PG_FUNCTION_ARGS)
{
	size_t		size,
				full;
	char	   *buf;

	require_region();
	full = atropos_stats(NULL, 0);
	do
	{
		/* It grows with each task that begins meanwhile. */
		size = full + 1024;
		buf = palloc(size);
		full = atropos_stats(buf, size);
	} while (full >= size);
	PG_RETURN_DATUM(CStringGetTextDatum(buf));
}

/* The task of a backend; 0 where there is none. */
static atropos_task_t
task_with_pid(int pid)
{
	for (int i = 0; i < atp_shared->size; i++)
	{
		AtroposBackend *row = &atp_shared->backends[i];
		atropos_task_t task = pg_atomic_read_u64(&row->task);

		pg_read_barrier();
		if (task != 0 && row->pid == pid)
			return task;
	}
	return 0;
}

Datum
atropos_pg_scope(PG_FUNCTION_ARGS)
{
	atropos_task_t task;
	uint64_t	scope;

	require_region();
	task = task_with_pid(PG_GETARG_INT32(0));
	scope = task != 0 ? atropos_task_scope(task) : 0;
	if (scope == 0)
		PG_RETURN_NULL();
	PG_RETURN_INT64((int64) scope);
}

Datum
atropos_pg_cancel(PG_FUNCTION_ARGS)
{
	int			pid = PG_GETARG_INT32(0);
	int64		scope = PG_GETARG_INT64(1);
	char		reason[64];
	atropos_task_t task;
	int			rc;

	require_region();
	if (scope < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("scope must be 0 (the present statement) or a number from atropos_scope(), not " INT64_FORMAT, scope)));
	task = task_with_pid(pid);
	if (task == 0)
	{
		ereport(WARNING, (errmsg("PID %d is not a session that Atropos follows", pid)));
		PG_RETURN_BOOL(false);
	}
	snprintf(reason, sizeof(reason), "asked for by PID %d", MyProcPid);
	rc = atropos_task_cancel(task, (uint64_t) scope, reason);
	if (rc != ATROPOS_OK && rc != ATROPOS_E_STALE)
		ereport(ERROR,
				(errmsg("could not ask for the cancel: %s", atp_last_error()),
				 errdetail("Code %d: %s", rc, atropos_strerror(rc))));
	PG_RETURN_BOOL(rc == ATROPOS_OK);
}

/* Filled by the library, so with malloc: palloc raises an error where there is no memory. */
typedef struct Lines
{
	char	   *text;			/* each ends with NUL */
	size_t		used,
				size;
	bool		out_of_memory;
} Lines;

static void
keep_line(const char *json, void *arg)
{
	Lines	   *lines = arg;
	size_t		length = strlen(json) + 1;

	if (lines->used + length > lines->size)
	{
		size_t		size = (lines->used + length) * 2;
		char	   *text = realloc(lines->text, size);

		if (text == NULL)
		{
			lines->out_of_memory = true;
			return;
		}
		lines->text = text;
		lines->size = size;
	}
	memcpy(lines->text + lines->used, json, length);
	lines->used += length;
}

Datum
atropos_pg_decisions(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	Lines		lines = {0};
	int			rc;

	require_region();
	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	rc = atropos_decisions(keep_line, &lines);
	PG_TRY();
	{
		if (rc < 0)
			ereport(ERROR,
					(errmsg("could not read the decisions of Atropos: %s", atp_last_error()),
					 errdetail("Code %d: %s", rc, atropos_strerror(rc))));
		if (lines.out_of_memory)
			ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
		for (size_t at = 0; at < lines.used; at += strlen(lines.text + at) + 1)
		{
			Datum		value = CStringGetTextDatum(lines.text + at);
			bool		is_null = false;

			tuplestore_putvalues(result->setResult, result->setDesc, &value, &is_null);
		}
	}
	PG_FINALLY();
	{
		free(lines.text);
	}
	PG_END_TRY();
	return (Datum) 0;
}
