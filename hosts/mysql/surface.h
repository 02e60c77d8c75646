/*
 * What plugin.cc, controller.cc and tables.cc share beside atropos_mysql.h. SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef ATROPOS_MYSQL_SURFACE_H
#define ATROPOS_MYSQL_SURFACE_H

#include "atropos_mysql.h"

#include "mysql/components/services/bits/status_variables_bits.h"

constexpr size_t ATM_LABEL_BYTES = 47; /* what the library keeps of a task's label */

/* ---- plugin.cc ---- */
/* False: the plugin could not start, nothing is traced and nobody cancelled. */
bool atm_region_ready();
bool atm_mode_is_off();
const char *atm_last_error(char *buf, size_t size);

/* ---- controller.cc ---- */
/* True: failed. Must come before any other call of the library, which logs through it. */
bool atm_log_open();
void atm_log_close();
/* Writes what the library said meanwhile; one thread at a time. */
void atm_log_flush();
/* Levels are the library's: 1 error, 2 warning, 3 notice, 4 debug. */
void atm_log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* 0, or an errno. */
int atm_controller_start();
/* Returns when the thread has ended. */
void atm_controller_stop();
/* Ends its pause, so that new settings work at once. */
void atm_controller_wake();

/* ---- tables.cc ---- */
int atm_resources_init(void *schema_table);
int atm_tasks_init(void *schema_table);
int atm_decisions_init(void *schema_table);
extern SHOW_VAR atm_status_variables[];
/* Registers the functions for SQL; true: one could not be, and none is. */
bool atm_functions_register();
void atm_functions_unregister();

#endif /* ATROPOS_MYSQL_SURFACE_H */
