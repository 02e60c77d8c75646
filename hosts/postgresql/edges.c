/*
 * Who blocks whom, read from PostgreSQL's lock table. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The same judgement as pg_blocking_pids, but for all waiters in one consistent pass. GetBlockerStatusData would
 * take all partition locks once for each waiter, and allocate: an error there would jump through the library.
 * Called by the controller only while an overload is suspected. The locks are held, shared, for one walk over the
 * waiters; its length is bounded by the room for edges.
 */
#include "atropos_pg.h"

#include "storage/lwlock.h"
#include "storage/proc.h"

/* A long queue for one lock would give W*W/2 edges; whoever bars many stands near its head. */
#define MAX_QUEUED_PER_WAITER 8

typedef struct Walk
{
	atropos_edge *edges;
	size_t		n,
				max;
} Walk;

static PGPROC *
leader_of(PGPROC *proc)
{
	return proc->lockGroupLeader ? proc->lockGroupLeader : proc;
}

/* 0 for a prepared transaction (pid 0) and for untracked processes. */
static atropos_task_t
task_of(const PGPROC *proc)
{
	const AtroposBackend *row;
	atropos_task_t task;

	if (proc->pid == 0 || proc->pgprocno >= atp_shared->size)
		return 0;
	row = &atp_shared->backends[proc->pgprocno];
	task = pg_atomic_read_u64((pg_atomic_uint64 *) &row->task);
	pg_read_barrier();
	return row->pid == proc->pid ? task : 0;
}

static void
add(Walk *walk, const PGPROC *blocker, atropos_edge edge, uint32_t kind)
{
	if (walk->n == walk->max)
		return;
	edge.blocker = task_of(blocker);
	edge.kind = kind;
	walk->edges[walk->n++] = edge;
}

static PGPROC *
next_in_queue(PGPROC *proc)
{
	return (PGPROC *) proc->links.next;
}

static void
add_edges_of(Walk *walk, LOCK *lock, PGPROC *waiter, atropos_edge edge)
{
	LOCKMASK	conflicts = GetLocksMethodTable(lock)->conflictTab[waiter->waitLockMode];
	PGPROC	   *leader = leader_of(waiter);
	PROCLOCK   *held;
	PGPROC	   *ahead = (PGPROC *) lock->waitProcs.links.next;
	int			queued = 0;

	for (held = (PROCLOCK *) SHMQueueNext(&lock->procLocks, &lock->procLocks, offsetof(PROCLOCK, lockLink));
		 held != NULL && walk->n < walk->max;
		 held = (PROCLOCK *) SHMQueueNext(&lock->procLocks, &held->lockLink, offsetof(PROCLOCK, lockLink)))
		if ((held->holdMask & conflicts) != 0 && held->groupLeader != leader)
			add(walk, held->groupLeader, edge, ATROPOS_EDGE_HOLDS);

	for (; ahead != waiter && queued < MAX_QUEUED_PER_WAITER && walk->n < walk->max; ahead = next_in_queue(ahead))
		if ((LOCKBIT_ON(ahead->waitLockMode) & conflicts) != 0 && (ahead->heldLocks & conflicts) == 0 &&
			leader_of(ahead) != leader)
		{
			add(walk, leader_of(ahead), edge, ATROPOS_EDGE_QUEUED);
			queued++;
		}
}

size_t
atp_edges(atropos_edge *edges, size_t max, void *arg)
{
	Walk		walk = {edges, 0, max};

	/* In order of their number, as everyone who takes more than one does. */
	for (int i = 0; i < NUM_LOCK_PARTITIONS; i++)
		LWLockAcquire(LockHashPartitionLockByIndex(i), LW_SHARED);
	/* All processes, prepared transactions apart: those never wait. Which lock a process waits for, and who is in
	 * its lock group, cannot change while the partitions are held. */
	for (uint32 i = 0; i < ProcGlobal->allProcCount && walk.n < max; i++)
	{
		PGPROC	   *waiter = &ProcGlobal->allProcs[i];
		LOCK	   *lock = waiter->waitLock;
		atropos_edge edge = {0};

		if (lock == NULL)
			continue;
		edge.waiter = task_of(leader_of(waiter));
		edge.resource = atp_resource_of(&lock->tag, &edge.instance);
		if (edge.waiter != 0 && edge.resource != 0)
			add_edges_of(&walk, lock, waiter, edge);
	}
	for (int i = NUM_LOCK_PARTITIONS; --i >= 0;)
		LWLockRelease(LockHashPartitionLockByIndex(i));
	return walk.n;
}
