/*
 * The background worker that drives the library. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * It has shared memory only, no database. Should it die, the postmaster starts it again and the new one takes over
 * the lease in the region; meanwhile nobody is cancelled and nothing else changes.
 */
#include "atropos_pg.h"

#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/guc.h"

#define TICK_WHILE_OFF_MS 1000
#define RESTART_S 1

/* Messages of the library wait here until its frames are left: ereport may jump, and must not jump over them. */
#define MESSAGES 32
static struct
{
	int			level;
	char		text[1024];
}			messages[MESSAGES];
static int	message_count,
			messages_lost;

PGDLLEXPORT void atropos_controller_main(Datum arg);

static void
keep_message(int level, const char *text, void *arg)
{
	if (message_count == MESSAGES)
	{
		messages_lost++;
		return;
	}
	messages[message_count].level = level;
	strlcpy(messages[message_count++].text, text, sizeof(messages[0].text));
}

void
atp_capture_log(void)
{
	atropos_set_log(keep_message, NULL);
}

void
atp_flush_log(void)
{
	int			count = message_count,
				lost = messages_lost;

	message_count = messages_lost = 0;
	for (int i = 0; i < count; i++)
		ereport(messages[i].level <= 2 ? WARNING : messages[i].level == 3 ? LOG : DEBUG1,
				(errmsg("atropos: %s", messages[i].text)));
	if (lost > 0)
		ereport(LOG, (errmsg("atropos: %d more messages came at once and were dropped", lost)));
}

static void
reload(void)
{
	atropos_config cfg;
	char		region_path[MAXPGPATH];
	int			rc;

	ProcessConfigFile(PGC_SIGHUP);
	atp_fill_config(&cfg, region_path, sizeof(region_path));
	rc = atropos_reload(&cfg);
	atp_flush_log();
	if (rc != ATROPOS_OK)
		ereport(LOG,
				(errmsg("Atropos keeps its former settings: %s", atp_last_error()),
				 errdetail("Code %d: %s", rc, atropos_strerror(rc))));
}

static size_t
describe(atropos_resource_t resource, uint64_t instance, char *buf, size_t size, void *arg)
{
	return Min(strlen(atp_describe(resource, instance, NULL, buf, size)), size);
}

void
atropos_controller_main(Datum arg)
{
	int			last_rc = ATROPOS_OK;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
	BackgroundWorkerUnblockSignals();

	if (!atp_join_region())
	{
		ereport(LOG, (errmsg("the Atropos controller ends: there is no region, see the messages at server start")));
		proc_exit(0);			/* 0: not to be started again */
	}
	atp_capture_log();
	atropos_edge_source(atp_edges, NULL);
	atropos_set_describe(describe, NULL);
	atropos_set_cancel_action_ex(atp_nudge, NULL, ATROPOS_ACTION_ANYWHERE);

	while (!ShutdownRequestPending)
	{
		int			rc;

		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			reload();
		}
		rc = atropos_controller_tick();
		atp_flush_log();
		if (rc != last_rc && rc != ATROPOS_OK && rc != ATROPOS_E_NOT_LEADER)
			ereport(LOG,
					(errmsg("the Atropos controller cannot work: %s", atropos_strerror(rc)),
					 errdetail("%s", atp_last_error()),
					 errhint("The server goes on without protection. Set atropos.mode = off and reload to silence it.")));
		last_rc = rc;
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 atp_mode == ATROPOS_MODE_OFF ? TICK_WHILE_OFF_MS : Max(1, (long) atropos_controller_pause_ms()),
						 PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
	}
	atropos_shutdown();			/* gives the lease up, a successor need not wait for it */
	/* 1: should somebody terminate it while the server runs on, it comes back. */
	proc_exit(1);
}

void
atp_register_controller(void)
{
	BackgroundWorker worker = {
		.bgw_flags = BGWORKER_SHMEM_ACCESS,
		.bgw_start_time = BgWorkerStart_PostmasterStart,
		.bgw_restart_time = RESTART_S,
		.bgw_name = "atropos controller",
		.bgw_type = "atropos controller",
		.bgw_library_name = "atropos",
		.bgw_function_name = "atropos_controller_main",
	};

	RegisterBackgroundWorker(&worker);
}
