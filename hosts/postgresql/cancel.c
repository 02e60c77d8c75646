/*
 * Cancelling exactly the statement that was chosen. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * SIGINT has no addressee but a process: it hits whatever statement runs when it arrives. So the controller puts
 * {scope sequence, reason} into the task's mailbox and only nudges the backend. The backend looks at a point where
 * an error may be raised, and compares the sequence with its own, which nobody else changes: a later statement
 * cannot match. A nudge is PROCSIG_PARALLEL_MESSAGE: it makes the target serve its interrupts and means nothing
 * to a backend without parallel workers' messages. It may come late, twice or never; the controller repeats it.
 */
#include "atropos_pg.h"

#include "miscadmin.h"
#include "storage/proc.h"
#include "storage/procsignal.h"

static task_trace_interrupts_hook_type previous_interrupts;

/* The cancel action: runs in the controller's process, called by the library. Raises nothing. */
int
atp_nudge(const atropos_cancel_request *req, void *arg)
{
	for (int i = 0; i < atp_shared->size; i++)
	{
		AtroposBackend *row = &atp_shared->backends[i];

		if (pg_atomic_read_u64(&row->task) != req->task)
			continue;
		pg_read_barrier();
		return SendProcSignal(row->pid, PROCSIG_PARALLEL_MESSAGE, row->backend_id);
	}
	return -1;					/* has ended meanwhile */
}

/* What was held, as far as it can be told without a catalog: no lookup is safe where interrupts are served. */
const char *
atp_describe(atropos_resource_t resource, uint64 instance, const char *other, char *buf, size_t size)
{
	if (atp_resource_is_relation(resource))
		snprintf(buf, size, "a lock on the relation with OID %u of the database with OID %u",
				 (uint32) instance, (uint32) (instance >> 32));
	else if (atp_resource_is_transaction(resource))
		snprintf(buf, size, "rows locked by transaction %u", (uint32) instance);
	else if (other != NULL)
		snprintf(buf, size, "\"%s\"", other);
	else
		buf[0] = '\0';
	return buf;
}

static void
raise_cancel(const atropos_cancel_info *info, int level, int code, const char *message, const char *hint)
{
	bool		by_hand = info->resource == 0;
	char		what[128],
				why[256];

	if (by_hand)
		snprintf(why, sizeof(why), "%s", info->reason);
	else
		snprintf(why, sizeof(why), "this session held, or was first in line for, %s for %.0f ms while %u others waited for it",
				 atp_describe(info->resource, info->instance, info->resource_name, what, sizeof(what)), info->held_ns / 1e6, info->victims);
	ereport(level,
			(errcode(code),
			 errmsg_internal("%s due to %s", message, by_hand ? "administrator request" :
							 level == FATAL ? "an idle transaction that blocks others" : "resource overload"),
			 errdetail("Atropos: %s (statement " UINT64_FORMAT ").", why, info->scope),
			 errdetail_log("Atropos: %s (statement " UINT64_FORMAT ", decision " UINT64_FORMAT ").", why, info->scope,
						   info->decision_id),
			 by_hand ? 0 : errhint("%s", hint)));
}

static void
on_interrupts(bool reading_command)
{
	atropos_cancel_info info = {.size = sizeof(info)};

	if (previous_interrupts)
		previous_interrupts(reading_command);
	if (atp_self.task == 0 || !atp_self.window_open)
		return;
	if (atropos_task_cancel_info(atp_self.task, &info) != 1 || info.scope != atp_self.scope)
		return;

	if (reading_command)
	{
		/* No statement to fail. The transaction left open is the culprit: end it as the idle timeout would. Other
		 * pauses of a client (within a pipeline, outside a transaction, in a failed block) hold nothing or end soon. */
		if (!atp_terminate_idle_in_transaction || atp_self.state != STATE_IDLEINTRANSACTION ||
			!IsTransactionOrTransactionBlock() || IsAbortedTransactionBlockState())
			return;
		atropos_task_cancel_acknowledge(atp_self.task, info.scope);
		raise_cancel(&info, FATAL, ERRCODE_IDLE_IN_TRANSACTION_SESSION_TIMEOUT,
					 "terminating connection",
					 "Commit or roll back before leaving a transaction idle. An administrator can exempt a role with "
					 "\"atropos.protect_roles\", or all idle transactions with \"atropos.terminate_idle_in_transaction\".");
	}
	if (!atp_self.in_request || atp_self.state == STATE_IDLE)
		return;
	/* Set only inside the transaction that freezes the table: the server would have to stop without it. */
	if (MyProc->statusFlags & PROC_VACUUM_FOR_WRAPAROUND)
		return;
	if (QueryCancelHoldoffCount != 0)
	{
		/* Within a message of the protocol an error would lose its boundary. Come again. */
		InterruptPending = true;
		return;
	}
	/* The library hears of it before the error leaves: ereport does not come back. */
	atropos_task_cancel_acknowledge(atp_self.task, info.scope);
	LockErrorCleanup();
	raise_cancel(&info, ERROR, ERRCODE_QUERY_CANCELED,
				 MyBackendType == B_AUTOVAC_WORKER ? "canceling autovacuum task" : "canceling statement",
				 "Retry later, in smaller steps or outside busy hours. An administrator can exempt a role with "
				 "\"atropos.protect_roles\".");
}

void
atp_cancel_install_hooks(void)
{
	previous_interrupts = task_trace_interrupts_hook;
	task_trace_interrupts_hook = on_interrupts;
}
