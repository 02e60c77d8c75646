/*
 * What a backend tells of itself: the statement it runs, the transaction around it, the locks it holds and
 * waits for. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * One backend is one task. A request is one statement: it begins with the first RUNNING report and ends with
 * the idle report, so the commit at Sync counts. Parse, Bind and Execute of one statement all report RUNNING;
 * they stay one request with one scope sequence. A RUNNING after something was executed (a pipeline) is the
 * next statement: new request, new scope. Between requests the scope stays that of the last statement, and
 * so do the holdings: that is how an idle transaction can be told from the statement it will send next.
 */
#include "atropos_pg.h"

#include "access/parallel.h"
#include "executor/executor.h"
#include "libpq/libpq-be.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "replication/logicalworker.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "tcop/utility.h"
#include "utils/varlena.h"

#define CLASS_CLIENT 0
#define CLASS_BACKGROUND 1

AtroposSelf atp_self;

static enum { NOT_JOINED, JOINED, JOIN_FAILED } membership;
static int	settings_seen = -1;
static atropos_resource_t relation_lock,
			transaction_lock,
			tuple_lock,
			advisory_lock,
			other_lock;

static task_trace_activity_hook_type previous_activity;
static task_trace_lock_hook_type previous_lock;
static ExecutorRun_hook_type previous_executor_run;
static ProcessUtility_hook_type previous_utility;

/* ---- joining ---- */

/* The postmaster registers them, its children inherit the ids. */
void
atp_register_resources(void)
{
	relation_lock = atropos_resource_register("pg relation lock", ATROPOS_LOCK);
	transaction_lock = atropos_resource_register("pg transaction lock", ATROPOS_LOCK);
	tuple_lock = atropos_resource_register("pg tuple lock", ATROPOS_LOCK);
	advisory_lock = atropos_resource_register("pg advisory lock", ATROPOS_LOCK);
	other_lock = atropos_resource_register("pg other lock", ATROPOS_LOCK);
}

bool
atp_resource_is_relation(atropos_resource_t resource)
{
	return resource != 0 && resource == relation_lock;
}

bool
atp_resource_is_transaction(atropos_resource_t resource)
{
	return resource != 0 && resource == transaction_lock;
}

/* Adopts the postmaster's region in this process, once. */
bool
atp_join_region(void)
{
	if (!atp_region_ready)
		return false;
	if (membership == NOT_JOINED)
	{
		int			rc = atropos_after_fork();

		membership = rc == ATROPOS_OK ? JOINED : JOIN_FAILED;
		if (rc != ATROPOS_OK)
			ereport(LOG,
					(errmsg("this process runs untracked: Atropos could not adopt its region: %s", atp_last_error()),
					 errdetail("Code %d: %s", rc, atropos_strerror(rc))));
	}
	return membership == JOINED;
}

static void
end_tracking(int code, Datum arg)
{
	if (atp_self.task == 0)
		return;
	pg_atomic_write_u64(&atp_shared->backends[MyProc->pgprocno].task, 0);
	atp_self.task = 0;
	/* Ends the task. Not atropos_free_cancel, which would keep the slot for this process's next task. */
	atropos_shutdown();
}

static void on_transaction_event(XactEvent event, void *arg);

/* Which processes are tasks. The others stay untracked: nobody cancels them, and where they block somebody
 * the edge source says "somebody untracked". */
static bool
is_task(void)
{
	switch (MyBackendType)
	{
		case B_BACKEND:
			return true;
		case B_AUTOVAC_WORKER:
			return true;
		case B_BG_WORKER:
			/* A parallel worker's locks and waits are its leader's; a cancelled apply worker would retry at once
			 * or disable its subscription. */
			return !IsParallelWorker() && !IsLogicalWorker();
		default:				/* walsender, startup, autovacuum launcher, checkpointer, ... */
			return false;
	}
}

/* The login role decides, not SET ROLE: known without a catalog, and a session cannot leave it. */
static bool
role_is_protected(void)
{
	char	   *copy;
	List	   *names;
	ListCell   *cell;
	bool		found = false;

	if (MyProcPort == NULL || MyProcPort->user_name == NULL || atp_protect_roles == NULL || atp_protect_roles[0] == '\0')
		return false;
	copy = pstrdup(atp_protect_roles);
	if (SplitIdentifierString(copy, ',', &names))
		foreach(cell, names)
			found = found || strcmp(lfirst(cell), MyProcPort->user_name) == 0;
	list_free(names);
	pfree(copy);
	return found;
}

static void
apply_settings(void)
{
	bool		foreign_worker = MyBackendType == B_BG_WORKER;

	settings_seen = atp_settings_generation;
	atropos_task_set(atp_self.task, ATROPOS_TASK_PRIORITY, atp_priority);
	/* Another module's worker may not survive an ERROR: seen, never cancelled. */
	atropos_task_set(atp_self.task, ATROPOS_TASK_PROTECTED, foreign_worker || role_is_protected());
}

static bool
begin_tracking(void)
{
	AtroposBackend *row;
	static bool registered = false;
	char		label[48];

	if (atp_self.decided || MyProc == NULL)
		return false;
	if (!IsUnderPostmaster || !is_task() || MyProc->pgprocno >= atp_shared->size || !atp_join_region())
	{
		atp_self.decided = true;
		return false;
	}
	/* A child's gate is closed until it has joined, so not earlier. */
	if (!atropos_trace_is_on())
		return false;
	atp_self.task = atropos_create_cancel((uint64_t) MyProcPid);
	if (atp_self.task == 0)
		return false;			/* table full: the library counts it, the next statement tries again */

	atp_self.background = MyBackendType != B_BACKEND;
	if (atp_self.background)
		atropos_task_set(atp_self.task, ATROPOS_TASK_BACKGROUND, 1);
	if (MyProcPort != NULL)
		snprintf(label, sizeof(label), "%s@%s", MyProcPort->user_name, MyProcPort->database_name);
	else
		strlcpy(label, GetBackendTypeDesc(MyBackendType), sizeof(label));
	atropos_task_set(atp_self.task, ATROPOS_TASK_LABEL, (int64_t) (uintptr_t) label);
	apply_settings();

	if (!registered)
	{
		RegisterXactCallback(on_transaction_event, NULL);
		/* Not before_shmem_exit: the rollback of a terminated session still holds its locks, and shall be seen. */
		on_shmem_exit(end_tracking, 0);
		registered = true;
	}
	row = &atp_shared->backends[MyProc->pgprocno];
	row->pid = MyProcPid;
	row->backend_id = MyProc->backendId;
	pg_write_barrier();
	pg_atomic_write_u64(&row->task, atp_self.task);
	return true;
}

/* ---- statements and transactions ---- */

/* A unit of work that outlives a statement; where the library is not told of one, it is the statement itself. */
static void
tell_work(bool begins)
{
	atp_self.told_work = begins;
	atropos_task_set(atp_self.task, ATROPOS_TASK_WORK_START, begins);
}

static void
tell_closed(bool closed)
{
	if (atp_self.told_closed != closed)
	{
		atp_self.told_closed = closed;
		atropos_task_set(atp_self.task, ATROPOS_TASK_CANCELLABLE, !closed);
	}
}

static void
open_window(void)
{
	atp_self.window_open = true;
	tell_closed(false);
}

static void
end_request(bool failed)
{
	if (atp_self.client_paced)
		atropos_task_client_wait(atp_self.task, 0);
	atropos_task_request_end(atp_self.task, failed ? 1 : 0);
	atp_self.in_request = atp_self.client_paced = false;
}

static void
on_running(void)
{
	/* A worker reports RUNNING for each piece of its work, and never idle. */
	if (atp_self.in_request && (atp_self.executed || atp_self.background))
		end_request(atp_self.failed);
	if (!atp_self.in_request)
	{
		if (settings_seen != atp_settings_generation)
			apply_settings();
		atropos_task_request_begin(atp_self.task, atp_self.background ? CLASS_BACKGROUND : CLASS_CLIENT);
		atp_self.scope = atropos_task_scope(atp_self.task);
		atp_self.in_request = true;
		atp_self.executed = atp_self.failed = atp_self.rollback_asked = false;
		atp_self.utility_depth = 0;
	}
	open_window();
}

static void
on_activity(BackendState state)
{
	if (previous_activity)
		previous_activity(state);
	if (atp_self.task == 0 && !begin_tracking())
		return;
	atp_self.state = state;
	if (state == STATE_RUNNING || state == STATE_FASTPATH)
	{
		if (atropos_trace_is_on())
			on_running();
	}
	else
	{
		if (atp_self.in_request)
			end_request(atp_self.failed || state == STATE_IDLEINTRANSACTION_ABORTED);
		/* Idle with locks, and nothing may act on a cancel: let the choice fall on somebody else. */
		if ((state == STATE_IDLEINTRANSACTION && !atp_terminate_idle_in_transaction) ||
			(state == STATE_IDLE && atp_self.advisory_held > 0))
			tell_closed(true);
	}
}

/*
 * The window: a statement whose commit has begun must not fail any more, or the client would read an error for
 * rows that are there. It closes before the commit and opens with the next execution; inside a utility command
 * (CALL, VACUUM, CREATE INDEX CONCURRENTLY) or a background worker a commit is only a step, so it opens at once.
 * From the end of PRE_COMMIT on PostgreSQL itself holds interrupts off. The library is told only where the commit
 * may last (it writes, it may wait for the disk or a standby): most statements need no word.
 */
static void
on_transaction_event(XactEvent event, void *arg)
{
	if (atp_self.task == 0)
		return;
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			atp_self.window_open = false;
			if (TransactionIdIsValid(GetTopTransactionIdIfAny()))
				tell_closed(true);
			break;
		case XACT_EVENT_ABORT:
			atp_self.failed = atp_self.failed || !atp_self.rollback_asked;
			/* fall through */
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PREPARE:
			atp_self.window_open = atp_self.rollback_asked = false;
			if (atp_self.utility_depth > 0 || atp_self.background)
			{
				tell_work(true);
				open_window();
			}
			else if (atp_self.told_work)
				tell_work(false);
			break;
		default:				/* parallel workers are no tasks */
			break;
	}
}

static void
on_executor_run(QueryDesc *query, ScanDirection direction, uint64 count, bool execute_once)
{
	if (atp_self.task != 0)
	{
		atp_self.executed = true;
		open_window();
	}
	if (previous_executor_run)
		previous_executor_run(query, direction, count, execute_once);
	else
		standard_ExecutorRun(query, direction, count, execute_once);
}

static bool
reads_from_client(const Node *statement)
{
	const CopyStmt *copy = (const CopyStmt *) statement;

	return IsA(statement, CopyStmt) && copy->is_from && copy->filename == NULL && !copy->is_program;
}

static void
note_transaction_statement(const Node *statement)
{
	if (!IsA(statement, TransactionStmt))
		return;
	switch (((const TransactionStmt *) statement)->kind)
	{
		case TRANS_STMT_BEGIN:
		case TRANS_STMT_START:
			if (!atp_self.told_work)
				tell_work(true);
			break;
		case TRANS_STMT_ROLLBACK:
			/* COMMIT of an aborted block rolls back as well, but there the failure was counted before. */
			atp_self.rollback_asked = true;
			break;
		default:
			break;
	}
}

static void
on_utility(PlannedStmt *planned, const char *text, bool read_only_tree, ProcessUtilityContext context,
		   ParamListInfo params, QueryEnvironment *environment, DestReceiver *dest, QueryCompletion *completion)
{
	ProcessUtility_hook_type next = previous_utility ? previous_utility : standard_ProcessUtility;

	if (atp_self.task == 0)
	{
		next(planned, text, read_only_tree, context, params, environment, dest, completion);
		return;
	}
	atp_self.executed = true;
	open_window();
	note_transaction_statement(planned->utilityStmt);
	if (atp_self.utility_depth == 0 && atp_self.in_request && reads_from_client(planned->utilityStmt))
	{
		atp_self.client_paced = true;
		atropos_task_client_wait(atp_self.task, 1);
	}
	atp_self.utility_depth++;
	PG_TRY();
	{
		next(planned, text, read_only_tree, context, params, environment, dest, completion);
	}
	PG_FINALLY();
	{
		if (atp_self.utility_depth > 0)
			atp_self.utility_depth--;
		if (atp_self.utility_depth == 0 && atp_self.client_paced)
		{
			atp_self.client_paced = false;
			atropos_task_client_wait(atp_self.task, 0);
		}
	}
	PG_END_TRY();
}

/* ---- locks ---- */

/* A 64-bit key of the whole tag, never 0 ("not told apart"). */
static uint64
mix_tag(const LOCKTAG *tag)
{
	uint64		x = (uint64) tag->locktag_field1 << 32 | tag->locktag_field2;

	x ^= ((uint64) tag->locktag_field3 << 32 | (uint64) tag->locktag_field4 << 16 | (uint64) tag->locktag_type << 8 |
		  tag->locktag_lockmethodid) * UINT64CONST(0x9e3779b97f4a7c15);
	x = (x ^ (x >> 30)) * UINT64CONST(0xbf58476d1ce4e5b9);
	x = (x ^ (x >> 27)) * UINT64CONST(0x94d049bb133111eb);
	x ^= x >> 31;
	return x != 0 ? x : 1;
}

/* The resource and instance of a lock; 0 for what is not followed: virtual transaction ids, which every
 * transaction holds and whose tag names the holder anyway. */
atropos_resource_t
atp_resource_of(const LOCKTAG *tag, uint64_t *instance)
{
	switch ((LockTagType) tag->locktag_type)
	{
		case LOCKTAG_RELATION:
			*instance = (uint64) tag->locktag_field1 << 32 | tag->locktag_field2;
			return relation_lock;
		case LOCKTAG_TRANSACTION:
			*instance = tag->locktag_field1;
			return transaction_lock;
		case LOCKTAG_TUPLE:
			*instance = mix_tag(tag);
			return tuple_lock;
		case LOCKTAG_ADVISORY:
			*instance = mix_tag(tag);
			return advisory_lock;
		case LOCKTAG_VIRTUALTRANSACTION:
			return 0;
		default:
			*instance = mix_tag(tag);
			return other_lock;
	}
}

/* Runs under partition locks and in critical sections: leaf code only. */
static void
on_lock(const LOCALLOCKTAG *tag, TaskTraceLockEvent event)
{
	atropos_resource_t resource;
	uint64_t	instance;

	if (previous_lock)
		previous_lock(tag, event);
	if (atp_self.task == 0 || !atropos_trace_is_on())
		return;
	resource = atp_resource_of(&tag->lock, &instance);
	if (resource == 0)
		return;
	switch (event)
	{
		case TASK_TRACE_LOCK_HELD:
			atropos_get_resource_on(resource, instance, 1);
			atp_self.advisory_held += resource == advisory_lock;
			break;
		case TASK_TRACE_LOCK_GONE:
			atropos_free_resource_on(resource, instance, 1);
			atp_self.advisory_held -= resource == advisory_lock && atp_self.advisory_held > 0;
			break;
		case TASK_TRACE_LOCK_WAIT:
			/* Waiting for a lock is not waiting for the client. */
			if (atp_self.client_paced)
				atropos_task_client_wait(atp_self.task, 0);
			atropos_slow_by_resource_on(resource, instance, 1);
			break;
		case TASK_TRACE_LOCK_WAIT_FAILED:
			atropos_wait_abandoned(resource);
			if (atp_self.client_paced)
				atropos_task_client_wait(atp_self.task, 1);
			break;
		case TASK_TRACE_LOCK_WAIT_END:	/* HELD follows and ends the wait */
			if (atp_self.client_paced)
				atropos_task_client_wait(atp_self.task, 1);
			break;
	}
}

void
atp_task_install_hooks(void)
{
	previous_activity = task_trace_activity_hook;
	task_trace_activity_hook = on_activity;
	previous_lock = task_trace_lock_hook;
	task_trace_lock_hook = on_lock;
	previous_executor_run = ExecutorRun_hook;
	ExecutorRun_hook = on_executor_run;
	previous_utility = ProcessUtility_hook;
	ProcessUtility_hook = on_utility;
}
