/*
 * The region and the rows. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The parent makes both anew for each generation: at a restart the children of the old one keep theirs, with their own
 * controller, until they are done. Nothing is ever shared between generations, so a change of the configuration never
 * meets processes that have the former one.
 */
#include "atropos_httpd.h"
#include "backlog.h"

#include "ap_mpm.h"
#include "apr_strings.h"
#include "unixd.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

ath_shared *ath_shared_memory;
/* Beside what the library reads at each call: the section is named as the library's, so that both share a page. */
__attribute__((section("atropos_hot"))) ath_child_state ath_child;

/* Children that die and their successors may have rows at the same time. */
#define SPARE_ROWS 32

static size_t shared_bytes;
static pid_t parent_pid;

uint64_t ath_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

const char *ath_last_error(void)
{
    static __thread char text[1024];

    return atropos_last_error(text, sizeof(text)) > 0 ? text : "no further text";
}

static apr_status_t leave_generation(void *dummy)
{
    /* Children inherit this cleanup, and run it when they exit. */
    if (getpid() != parent_pid)
        return APR_SUCCESS;
    atropos_shutdown();
    if (ath_shared_memory != NULL)
        munmap(ath_shared_memory, shared_bytes);
    ath_shared_memory = NULL;
    ath_child.row = NULL;
    return APR_SUCCESS;
}

/*
 * Opens the decision log as the parent, who may be root, and names it by its descriptor: so the unprivileged children
 * can open a file in a folder that is closed to them, as they can write the other logs. NULL = there will be none.
 */
static const char *open_decision_log(const char *path, apr_pool_t *pconf, server_rec *s)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC | O_NOCTTY, 0640);
    struct stat st;
    apr_file_t *file;

    if (fd < 0 || fstat(fd, &st) != 0) {
        ap_log_error(APLOG_MARK, APLOG_ERR, errno, s, "Atropos: cannot open the decision log %s; decisions go to the "
                     "error log only", path);
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    /* A file that has other names as well may be anybody's: it is not given away. */
    if (geteuid() == 0 && S_ISREG(st.st_mode) && st.st_nlink == 1 &&
        fchown(fd, ap_unixd_config.user_id, (gid_t)-1) != 0)
        ap_log_error(APLOG_MARK, APLOG_WARNING, errno, s, "Atropos: cannot give the decision log %s to the server's "
                     "user", path);
    /* Closed at the restart, when the next generation opens its own. */
    if (apr_os_file_put(&file, &fd, APR_FOPEN_WRITE | APR_FOPEN_APPEND, pconf) == APR_SUCCESS)
        apr_pool_cleanup_register(pconf, file, (apr_status_t (*)(void *))apr_file_close, apr_pool_cleanup_null);
    return apr_psprintf(pconf, "/proc/self/fd/%d", fd);
}

int ath_post_config(apr_pool_t *pconf, apr_pool_t *plog, apr_pool_t *ptemp, server_rec *s)
{
    ath_server_config *cfg = ap_get_module_config(s->module_config, &atropos_module);
    atropos_config library = cfg->library;
    int daemons = 1, threads = 0, rc, generation = 0;

    /* httpd reads its configuration twice at the start, and for a test; only what will serve gets a region. */
    if (ap_state_query(AP_SQ_MAIN_STATE) == AP_SQ_MS_CREATE_PRE_CONFIG ||
        ap_state_query(AP_SQ_RUN_MODE) != AP_SQ_RM_NORMAL || library.mode == ATROPOS_MODE_OFF)
        return OK;
    if (atropos_version() >> 16 != ATROPOS_VERSION_MAJOR) {
        ap_log_error(APLOG_MARK, APLOG_ERR, 0, s, "Atropos: built against version %s of the library, linked with "
                     "another", ATROPOS_VERSION_STRING);
        return OK;
    }
    ap_mpm_query(AP_MPMQ_MAX_DAEMONS, &daemons);
    ap_mpm_query(AP_MPMQ_MAX_THREADS, &threads);
    ap_mpm_query(AP_MPMQ_GENERATION, &generation);
    if (threads < 1)
        threads = 1;
    /* A request on every worker, as many whose answer event still writes, and what the dead leave to be reaped. */
    if (library.max_tasks == 0)
        library.max_tasks = (uint32_t)(daemons * threads > 32000 ? 65536 : daemons * threads * 2 + 64);
    library.region_path = cfg->region_path;
    if (cfg->decision_log != NULL)
        library.decision_log = open_decision_log(cfg->decision_log, pconf, s);

    atropos_set_log(ath_library_log, NULL);
    rc = atropos_init(&library);
    if (rc != ATROPOS_OK) {
        /* Without protection, but serving. */
        ap_log_error(APLOG_MARK, APLOG_ERR, 0, s, "Atropos: the server starts without it: %s (code %d: %s)",
                     ath_last_error(), rc, atropos_strerror(rc));
        return OK;
    }
    shared_bytes = sizeof(ath_shared) + (size_t)(daemons + SPARE_ROWS) * sizeof(ath_row) + sizeof(ath_fifo);
    ath_shared_memory = mmap(NULL, shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (ath_shared_memory == MAP_FAILED) {
        ath_shared_memory = NULL;
        ap_log_error(APLOG_MARK, APLOG_ERR, errno, s, "Atropos: the server starts without it: no %" APR_SIZE_T_FMT
                     " bytes of shared memory", shared_bytes);
        atropos_shutdown();
        return OK;
    }
    parent_pid = getpid();
    ath_shared_memory->rows = (uint32_t)(daemons + SPARE_ROWS);
    ath_shared_memory->generation = (uint32_t)generation;
    ath_shared_memory->fifo = (ath_fifo *)&ath_shared_memory->row[ath_shared_memory->rows];
    ath_child.slots = atropos_resource_register("httpd worker slot", ATROPOS_QUEUE);
    atropos_queue_capacity(ath_child.slots, (uint64_t)(daemons * threads));
    apr_pool_cleanup_register(pconf, NULL, leave_generation, apr_pool_cleanup_null);
    if (!ath_server_is_patched())
        ap_log_error(APLOG_MARK, APLOG_NOTICE, 0, s, "Atropos: this httpd was built without patches/httpd/2.4: "
                     "connections given up for want of a worker are not counted, and a shortage is seen by the "
                     "scoreboard alone");
    return OK;
}

/* ---- in a child ---- */

/* A row that is free, or whose child is gone. */
static ath_row *claim_row(void)
{
    uint32_t me = (uint32_t)getpid();

    for (uint32_t i = 0; i < ath_shared_memory->rows; i++) {
        ath_row *row = &ath_shared_memory->row[i];
        uint32_t pid = ATH_LOAD(row->pid);

        if (pid != 0 && pid != me && (kill((pid_t)pid, 0) == 0 || errno != ESRCH))
            continue;
        if (!__atomic_compare_exchange_n(&row->pid, &pid, me, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            continue;
        /* Counters go on; what describes the present belonged to the dead. */
        ATH_STORE(row->stopping, 0);
        ATH_STORE(row->shortage_ns, 0);
        ATH_STORE(row->parked, 0);
        return row;
    }
    return NULL;
}

static apr_status_t leave_child(void *dummy)
{
    ath_row *row = ath_child.row;

    atropos_shutdown();
    if (row != NULL) {
        ATH_STORE(row->parked, 0);
        ATH_STORE(row->shortage_ns, 0);
        ATH_STORE(row->pid, 0);
    }
    return APR_SUCCESS;
}

void ath_child_init(apr_pool_t *pchild, server_rec *s)
{
    int rc;

    if (ath_shared_memory == NULL)
        return;
    rc = atropos_after_fork();
    if (rc == ATROPOS_OK && (ath_child.row = claim_row()) == NULL)
        ap_log_error(APLOG_MARK, APLOG_ERR, 0, s, "Atropos: no row is free for this child, it runs without protection");
    if (rc != ATROPOS_OK)
        ap_log_error(APLOG_MARK, APLOG_ERR, 0, s, "Atropos: this child runs without it: %s (code %d: %s)",
                     ath_last_error(), rc, atropos_strerror(rc));
    if (ath_child.row == NULL)
        return;
    atropos_set_log(ath_library_log, NULL);
    atropos_set_cancel_action(ath_cancel, NULL);
    atropos_set_terminate_action(ath_cancel, NULL, 0);
    ath_child.sections_tell = ath_sections_tell();
    ath_queue_child_init();
    ath_requests_child_init();
    apr_pool_cleanup_register(pchild, NULL, leave_child, apr_pool_cleanup_null);
    /* What runs for tasks of this process while another child leads. */
    rc = atropos_agent_start();
    if (rc != ATROPOS_OK)
        ap_log_error(APLOG_MARK, APLOG_WARNING, 0, s, "Atropos: requests of this child can be cancelled only while it "
                     "leads: %s", ath_last_error());
    ath_controller_start(pchild, s); /* its cleanup runs before the one above */
}

/*
 * A child that is told to stop at once may be anywhere: prefork even destroys its pools within a signal handler. Locks
 * may be held then, so nothing of ours may be waited for. The lease falls to another child when this one is gone, and
 * the library reaps its tasks.
 */
void ath_child_stopping(apr_pool_t *pchild, int graceful)
{
    int threaded = AP_MPMQ_NOT_SUPPORTED;

    if (ath_child.row == NULL)
        return;
    ATH_STORE(ath_child.row->stopping, 1);
    ap_mpm_query(AP_MPMQ_IS_THREADED, &threaded);
    if (!graceful && threaded == AP_MPMQ_NOT_SUPPORTED) {
        ath_controller_abandon();
        apr_pool_cleanup_kill(pchild, NULL, leave_child);
        ATH_STORE(ath_child.row->pid, 0);
    }
}
