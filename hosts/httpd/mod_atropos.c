/*
 * The module's record and its hooks. SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "atropos_httpd.h"

#include "apr_optional_hooks.h"
#include "http_connection.h"
#include "mod_status.h"
#include "mpm_common.h"

/* Weak, so that an httpd without the patches can load the module: it then sees a shortage of workers by the scoreboard
 * alone, and no connection given up. */
#pragma weak ap_hook_worker_shortage

bool ath_server_is_patched(void)
{
    return ap_hook_worker_shortage != NULL;
}

static void register_hooks(apr_pool_t *p)
{
    ath_child.module_index = atropos_module.module_index;
    ap_hook_post_config(ath_post_config, NULL, NULL, APR_HOOK_FIRST);
    ap_hook_child_init(ath_child_init, NULL, NULL, APR_HOOK_MIDDLE);
    ap_hook_child_stopping(ath_child_stopping, NULL, NULL, APR_HOOK_MIDDLE);
    ap_hook_pre_connection(ath_pre_connection, NULL, NULL, APR_HOOK_REALLY_FIRST);
    ap_hook_pre_close_connection(ath_pre_close_connection, NULL, NULL, APR_HOOK_REALLY_LAST);
    ap_hook_suspend_connection(ath_suspend_connection, NULL, NULL, APR_HOOK_REALLY_FIRST);
    ap_hook_resume_connection(ath_resume_connection, NULL, NULL, APR_HOOK_REALLY_FIRST);
    ap_hook_post_read_request(ath_post_read_request, NULL, NULL, APR_HOOK_REALLY_FIRST);
    ap_hook_header_parser(ath_header_parser, NULL, NULL, APR_HOOK_REALLY_FIRST);
    ap_hook_insert_filter(ath_insert_filter, NULL, NULL, APR_HOOK_REALLY_LAST);
    ap_hook_handler(ath_status_handler, NULL, NULL, APR_HOOK_MIDDLE);
    if (ath_server_is_patched())
        ap_hook_worker_shortage(ath_worker_shortage, NULL, NULL, APR_HOOK_MIDDLE);
    APR_OPTIONAL_HOOK(ap, status_hook, ath_status_hook, NULL, NULL, APR_HOOK_MIDDLE);
    APR_REGISTER_OPTIONAL_FN(atropos_httpd);
    ath_register_filters();
}

/* The one symbol that httpd looks for; all others are hidden. */
__attribute__((visibility("default"))) module AP_MODULE_DECLARE_DATA atropos_module = {
    STANDARD20_MODULE_STUFF,
    ath_create_dir_config,
    ath_merge_dir_config,
    ath_create_server_config,
    NULL,
    ath_commands,
    register_hooks,
};
