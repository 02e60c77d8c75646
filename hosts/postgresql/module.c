/*
 * Start of the extension: settings, region, hooks. SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "atropos_pg.h"

#include "fmgr.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "storage/shmem.h"
#include "utils/guc.h"
#include "utils/varlena.h"

PG_MODULE_MAGIC;

AtroposShared *atp_shared;
bool		atp_region_ready;

int			atp_mode = ATROPOS_MODE_OBSERVE;
int			atp_priority;
bool		atp_terminate_idle_in_transaction = true;
char	   *atp_protect_roles;
int			atp_settings_generation;

static double slo_ms,
			slo_tolerance,
			contention_threshold,
			min_relief,
			cancel_rate_per_s,
			cancel_share;
static int	window_ms,
			trigger_windows,
			verify_ms,
			cancel_burst,
			max_tasks;
static char *decision_log;

static shmem_request_hook_type previous_shmem_request;
static shmem_startup_hook_type previous_shmem_startup;

void		_PG_init(void);

const char *
atp_last_error(void)
{
	static char text[1024];

	if (atropos_last_error(text, sizeof(text)) == 0)
		strlcpy(text, "no further text", sizeof(text));
	return text;
}

/* region_path is the room in which the path lives as long as cfg. */
void
atp_fill_config(atropos_config *cfg, char *region_path, size_t region_path_size)
{
	snprintf(region_path, region_path_size, "%s/atropos.region", DataDir);
	*cfg = (atropos_config)
	{
		.size = sizeof(*cfg),
			.region_path = region_path,
			.decision_log = decision_log && decision_log[0] ? decision_log : NULL,
			.mode = atp_mode,
			/* Every backend there can be, and room for the dead of a crash that are not reaped yet. */
			.max_tasks = max_tasks > 0 ? Max(16, max_tasks) : Min(65536, Max(64, MaxBackends * 2)),
			.window_ms = window_ms,
			.trigger_windows = trigger_windows,
			.verify_ms = verify_ms,
			.slo_ms = slo_ms,
			.slo_tolerance = slo_tolerance,
			.contention_threshold = contention_threshold,
			.min_relief = min_relief,
			.cancel_rate_per_s = cancel_rate_per_s,
			.cancel_burst = cancel_burst,
			.cancel_share = cancel_share,
	};
}

static Size
shared_size(void)
{
	return add_size(offsetof(AtroposShared, backends), mul_size(sizeof(AtroposBackend), MaxBackends));
}

static void
on_shmem_request(void)
{
	if (previous_shmem_request)
		previous_shmem_request();
	RequestAddinShmemSpace(shared_size());
}

/* In the postmaster alone: children reset what is to be done at exit. Removes the region's file. */
static void
leave_region(int code, Datum arg)
{
	atropos_shutdown();
}

/* In the postmaster, before any child; again after a crash, when PostgreSQL's memory is new and the region is not. */
static void
on_shmem_startup(void)
{
	bool		found;

	if (previous_shmem_startup)
		previous_shmem_startup();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	atp_shared = ShmemInitStruct("atropos backends", shared_size(), &found);
	if (!found)
	{
		atp_shared->size = MaxBackends;
		for (int i = 0; i < MaxBackends; i++)
		{
			pg_atomic_init_u64(&atp_shared->backends[i].task, 0);
			atp_shared->backends[i].pid = 0;
			atp_shared->backends[i].backend_id = InvalidBackendId;
		}
	}
	LWLockRelease(AddinShmemInitLock);

	/* Here and not in _PG_init: "postgres -C" and the single-user mode must not touch a region, and MaxBackends is
	 * known only now. */
	if (!atp_region_ready && IsPostmasterEnvironment && !IsUnderPostmaster)
	{
		atropos_config cfg;
		char		region_path[MAXPGPATH];
		int			rc;

		atp_capture_log();
		atp_fill_config(&cfg, region_path, sizeof(region_path));
		rc = atropos_init(&cfg);
		atp_flush_log();
		if (rc == ATROPOS_OK)
		{
			atp_region_ready = true;
			atp_register_resources();
			on_proc_exit(leave_region, 0);
		}
		else
			ereport(WARNING,
					(errmsg("the server starts without Atropos: %s", atp_last_error()),
					 errdetail("atropos_init with region \"%s\": code %d: %s", region_path, rc, atropos_strerror(rc)),
					 errhint("Correct the cause and restart the server, or remove atropos from shared_preload_libraries.")));
	}
}

/* ---- settings ---- */

static const struct config_enum_entry modes[] = {
	{"off", ATROPOS_MODE_OFF, false},
	{"observe", ATROPOS_MODE_OBSERVE, false},
	{"enforce", ATROPOS_MODE_ENFORCE, false},
	{NULL, 0, false}
};

static bool
check_roles(char **value, void **extra, GucSource source)
{
	char	   *copy = pstrdup(*value ? *value : "");
	List	   *names = NIL;
	bool		ok = SplitIdentifierString(copy, ',', &names);

	if (!ok)
		GUC_check_errdetail("It must be a list of role names, separated by commas.");
	list_free(names);
	pfree(copy);
	return ok;
}

static void
roles_changed(const char *value, void *extra)
{
	atp_settings_generation++;
}

static void
priority_changed(int value, void *extra)
{
	atp_settings_generation++;
}

static void
define_settings(void)
{
	DefineCustomEnumVariable("atropos.mode", "What Atropos does about an overload.",
							 "off: nothing, and traces nothing. observe: decides and records, cancels nobody. "
							 "enforce: cancels the culprit.",
							 &atp_mode, ATROPOS_MODE_OBSERVE, modes, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomRealVariable("atropos.slo", "Objective for the 99th percentile of statement latency.",
							 "0 learns it from the server's own calm times.",
							 &slo_ms, 0, 0, 3600000, PGC_SIGHUP, GUC_UNIT_MS, NULL, NULL, NULL);
	DefineCustomRealVariable("atropos.slo_tolerance", "How far latency may rise over the learned baseline, as a fraction.",
							 "Counts only while atropos.slo is 0.",
							 &slo_tolerance, 0.20, 0.01, 10, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomRealVariable("atropos.contention_threshold", "Share of execution time lost to one resource that makes it the cause.",
							 NULL, &contention_threshold, 0.30, 0.01, 1, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomRealVariable("atropos.min_relief", "Share of execution time that a cancel must give back.",
							 NULL, &min_relief, 0.25, 0.01, 1, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("atropos.window_length", "Length of one measuring window.",
							NULL, &window_ms, 100, 20, 10000, PGC_SIGHUP, GUC_UNIT_MS, NULL, NULL, NULL);
	DefineCustomIntVariable("atropos.trigger_windows", "Windows in a row over the objective that make an overload.",
							NULL, &trigger_windows, 3, 1, 100, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("atropos.verify", "Time in which a cancel must show its effect.",
							NULL, &verify_ms, 200, 10, 60000, PGC_SIGHUP, GUC_UNIT_MS, NULL, NULL, NULL);
	DefineCustomRealVariable("atropos.cancel_rate", "Cancels a second on average, at most.",
							 NULL, &cancel_rate_per_s, 2, 0.001, 1000, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("atropos.cancel_burst", "Cancels at once, at most.",
							NULL, &cancel_burst, 4, 1, 1000, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomRealVariable("atropos.cancel_share", "Share of the completed statements that may be cancelled, the burst excepted.",
							 NULL, &cancel_share, 0.01, 0.0001, 1, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("atropos.max_tasks", "Sessions that can be followed at once.",
							"0 sizes it by the connections the server allows. Sessions beyond it run untracked.",
							&max_tasks, 0, 0, 65536, PGC_POSTMASTER, 0, NULL, NULL, NULL);
	DefineCustomStringVariable("atropos.decision_log", "File that gets one line of JSON for each decision.",
							   "Relative to the data directory; empty writes none. Decisions go to the server log in any case.",
							   &decision_log, "", PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomStringVariable("atropos.protect_roles", "Roles whose sessions are never cancelled, by the name they log in with.",
							   "Replication connections are never cancelled, whatever their role.",
							   &atp_protect_roles, "", PGC_SIGHUP, GUC_LIST_INPUT, check_roles, roles_changed, NULL);
	DefineCustomIntVariable("atropos.priority", "Importance of this session, higher is more important.",
							"Of two culprits that count the same, the one of lower priority is cancelled.",
							&atp_priority, 0, -100, 100, PGC_SUSET, 0, NULL, priority_changed, NULL);
	DefineCustomBoolVariable("atropos.terminate_idle_in_transaction",
							 "Ends the session of an idle transaction that is the culprit.",
							 "No error can reach an idle session, so only ending it frees its locks.",
							 &atp_terminate_idle_in_transaction, true, PGC_SIGHUP, 0, NULL, NULL, NULL);
	MarkGUCPrefixReserved("atropos");
}

void
_PG_init(void)
{
	if (!process_shared_preload_libraries_in_progress)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("atropos must be loaded when the server starts"),
				 errhint("Add atropos to shared_preload_libraries and restart the server.")));
	if (&task_trace_activity_hook == NULL || &task_trace_interrupts_hook == NULL || &task_trace_lock_hook == NULL)
		ereport(FATAL,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("atropos cannot work in this server: it was built without the task_trace patches"),
				 errhint("Build PostgreSQL with patches/postgresql/%d of Atropos, or remove atropos from shared_preload_libraries.",
						 PG_VERSION_NUM / 10000)));

	define_settings();
	previous_shmem_request = shmem_request_hook;
	shmem_request_hook = on_shmem_request;
	previous_shmem_startup = shmem_startup_hook;
	shmem_startup_hook = on_shmem_startup;
	atp_task_install_hooks();
	atp_cancel_install_hooks();
	atp_register_controller();
}
