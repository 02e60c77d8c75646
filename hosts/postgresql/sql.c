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
