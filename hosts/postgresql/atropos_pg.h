/*
 * Atropos in PostgreSQL: what the parts of the extension share.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 *   module.c      start: settings, region, hooks, registration of the controller
 *   task.c        what a backend tells of itself: statements, transactions, locks
 *   cancel.c      what a backend does when its statement was chosen
 *   edges.c       who blocks whom, read from the lock table on demand
 *   controller.c  the background worker that drives the library
 *   sql.c         functions for SQL
 *
 * One rule stands over all of them: an error of PostgreSQL is a longjmp and must not cross a frame of the
 * library. So whatever the library calls back (edges, nudge, log) raises nothing and allocates nothing.
 */
#ifndef ATROPOS_PG_H
#define ATROPOS_PG_H

#include "postgres.h"

#include "access/xact.h"
#include "port/atomics.h"
#include "storage/lock.h"
#include "utils/task_trace.h"

#include "atropos_trace.h"

/* Weak in every file (one strong reference would make them strong), so that a server without the patches can
 * load the module far enough to be told so. */
#pragma weak task_trace_activity_hook
#pragma weak task_trace_interrupts_hook
#pragma weak task_trace_lock_hook

/* The row of one backend in shared memory, indexed by PGPROC.pgprocno. The backend alone writes it; pid and
 * backend_id are set before task is published and stand until task is 0 again. */
typedef struct AtroposBackend
{
	pg_atomic_uint64 task;		/* atropos_task_t; 0: no task */
	int			pid;
	BackendId	backend_id;		/* for SendProcSignal */
} AtroposBackend;

typedef struct AtroposShared
{
	int			size;			/* rows */
	AtroposBackend backends[FLEXIBLE_ARRAY_MEMBER];
} AtroposShared;

/* What this backend knows of itself. */
typedef struct AtroposSelf
{
	atropos_task_t task;		/* 0: untracked */
	uint64		scope;			/* scope sequence of the present, or last, statement */
	BackendState state;			/* as last reported */
	bool		decided;		/* whether to track this process was decided */
	bool		background;		/* autovacuum or another module's worker */
	bool		in_request;		/* between the first RUNNING and the idle report */
	bool		executed;		/* something ran since the request began */
	bool		failed;			/* the transaction aborted, and nobody asked for it */
	bool		rollback_asked;
	bool		window_open;	/* a cancel may act: nothing of this statement is committed */
	bool		told_closed;	/* the library was told that it cannot be cancelled now */
	bool		told_work;		/* the library was told that a unit of work began */
	bool		client_paced;	/* COPY FROM STDIN: the client sets the pace */
	int			utility_depth;
	int			advisory_held;	/* advisory locks, the only ones that outlive a transaction */
} AtroposSelf;

/* module.c */
extern AtroposShared *atp_shared;
extern bool atp_region_ready;
extern int	atp_mode;
extern int	atp_priority;
extern bool atp_terminate_idle_in_transaction;
extern char *atp_protect_roles;
extern int	atp_settings_generation;	/* changes when priority or protect_roles changes */
extern void atp_fill_config(atropos_config *cfg, char *region_path, size_t region_path_size);
extern const char *atp_last_error(void);

/* task.c */
extern AtroposSelf atp_self;
extern void atp_task_install_hooks(void);
extern bool atp_join_region(void);
extern void atp_register_resources(void);
extern atropos_resource_t atp_resource_of(const LOCKTAG *tag, uint64_t *instance);
extern bool atp_resource_is_relation(atropos_resource_t resource);
extern bool atp_resource_is_transaction(atropos_resource_t resource);
extern const char *atp_describe(atropos_resource_t resource, uint64 instance, const char *other, char *buf, size_t size);

/* cancel.c */
extern void atp_cancel_install_hooks(void);
extern int	atp_nudge(const atropos_cancel_request *req, void *arg);

/* edges.c */
extern size_t atp_edges(atropos_edge *edges, size_t max, void *arg);

/* controller.c */
extern void atp_register_controller(void);
extern void atp_capture_log(void);
extern void atp_flush_log(void);

#endif							/* ATROPOS_PG_H */
