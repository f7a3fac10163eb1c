/* Which part answers which request; see dispatch.h for the guarantee. */
#include "dispatch.h"

#include "files.h"
#include "jobs.h"
#include "listing.h"
#include "network.h"
#include "process.h"
#include "state.h"
#include "tunnels.h"
#include "uploads.h"
#include "watch.h"

#include <errno.h>
#include <stddef.h>

struct entry {
    void (*handle)(struct request *request);
    bool mutates;
};

static void cancel(struct request *request)
{
    uint64_t id = get_u64(&request->body);
    if (request->body.bad)
        return;
    process_cancel(id);
    listing_cancel(id);
    watch_cancel(id);
}

static const struct entry table[] = {
    [OP_CANCEL] = {cancel, false},
    [OP_INFO] = {state_info, false},
    [OP_START] = {process_start, true},
    [OP_RUN] = {process_run, false},
    [OP_WAIT] = {process_wait, false},
    [OP_OUTPUT] = {process_output, false},
    [OP_WRITE] = {process_write, true},
    [OP_CLOSE_STDIN] = {process_close_stdin, true},
    [OP_SIGNAL] = {process_signal, true},
    [OP_RESIZE] = {process_resize, true},
    [OP_PROCESSES] = {process_list, false},
    [OP_FORGET] = {process_forget, true},
    [OP_PROCESS] = {process_look, false},
    [OP_STAT] = {files_stat, false},
    [OP_LIST] = {listing_start, false},
    [OP_READ] = {files_read, false},
    [OP_WRITE_FILE] = {uploads_whole, true},
    [OP_WRITE_BEGIN] = {uploads_begin, true},
    [OP_WRITE_DATA] = {uploads_data, true},
    [OP_WRITE_END] = {uploads_end, true},
    [OP_WRITE_ABORT] = {uploads_abort, true},
    [OP_MKDIR] = {files_mkdir, true},
    [OP_REMOVE] = {files_remove, true},
    [OP_MOVE] = {files_move, true},
    [OP_CHMOD] = {files_chmod, true},
    [OP_CHOWN] = {files_chown, true},
    [OP_UTIME] = {files_utime, true},
    [OP_SYMLINK] = {files_symlink, true},
    [OP_LINK] = {files_link, true},
    [OP_MKNOD] = {files_mknod, true},
    [OP_WATCH] = {watch_start, true},
    [OP_WATCH_READ] = {watch_read, false},
    [OP_WATCH_END] = {watch_end, true},
    [OP_ACTIVITY] = {state_activity, false},
    [OP_UNLINKED] = {state_unlinked, false},
    [OP_SYNC] = {state_sync, false},
    [OP_REFRESH] = {state_refresh, true},
    [OP_NETWORK] = {network_switch, true},
    [OP_DIAL] = {tunnels_dial, true},
};

static const struct entry *find(uint16_t op)
{
    if (op >= sizeof table / sizeof *table || !table[op].handle)
        return NULL;
    return &table[op];
}

bool op_mutates(uint16_t op)
{
    const struct entry *entry = find(op);
    return entry && entry->mutates;
}

bool dispatch(struct request *request)
{
    const struct entry *entry = find(request->op);
    if (!entry) {
        answer_error(request->id, request->op, ENOSYS, STAGE_NONE, "unknown operation");
        return true;
    }
    if (jobs_running(request->id) || tunnels_dialing(request->id))
        return true; /* repeated while its first copy is at work; that one will answer */
    entry->handle(request);
    return !request->body.bad;
}

void dispatch_acknowledged(uint64_t id) { process_acknowledged(id); }

void dispatch_parked_drop(void)
{
    process_parked_drop();
    listing_drop();
    watch_parked_drop();
}

void dispatch_new_client(void)
{
    process_new_client();
    uploads_abort_all();
    watch_end_all();
    jobs_disown();
}
