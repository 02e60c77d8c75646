/*
 * Reading the library's JSON, for the status page. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A cursor over text that the library has just written. No tree is built and nothing is allocated; broken or cut text
 * ends the walk early and is never read beyond its NUL.
 */
#ifndef ATH_JSON_H
#define ATH_JSON_H

#include <stdbool.h>
#include <stddef.h>

/* Receives what a walk finds. For begin and end `value` is NULL; a scalar's value is its text, of strings unescaped. */
typedef enum ath_json_event
{
    ATH_JSON_OBJECT,
    ATH_JSON_ARRAY,
    ATH_JSON_END, /* of either */
    ATH_JSON_STRING,
    ATH_JSON_OTHER /* number, true, false, null */
} ath_json_event;

/* `key` is the member's name, or NULL in an array. Strings are cut to what `ATH_JSON_TEXT` holds. */
#define ATH_JSON_TEXT 512
typedef void (*ath_json_fn)(void *arg, ath_json_event event, const char *key, const char *value);

/* Walks over one value; true if it was complete. Deeper than 32 levels is taken for broken. */
bool ath_json_walk(const char *text, ath_json_fn fn, void *arg);

#endif /* ATH_JSON_H */
