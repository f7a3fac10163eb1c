/* What the node asks of the records of processes; see process.h for the guarantee. */
#include "records.h"

#include "parked.h"
#include "process.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define LIST_BYTES (512u << 10)

void process_put_state(const struct process *p, struct bytes *to)
{
    uint8_t flags = (p->running ? PROCESS_RUNNING : 0) | (p->pty ? PROCESS_PTY : 0) |
                    (p->timed_out ? PROCESS_TIMED_OUT : 0) |
                    (p->exit_code >= 0 ? PROCESS_EXITED : 0) |
                    (p->signal >= 0 ? PROCESS_SIGNALED : 0) |
                    (p->reason ? PROCESS_HAS_REASON : 0);
    put_u64(to, p->id);
    put_u32(to, (uint32_t)p->pid);
    put_u8(to, flags);
    put_u32(to, (uint32_t)(p->exit_code >= 0 ? p->exit_code : p->signal >= 0 ? p->signal : 0));
    put_u64(to, p->started_ns);
    put_u64(to, p->ended_ns);
    put_u64(to, p->out.first);
    put_u64(to, p->out.next);
    put_u64(to, p->err.first);
    put_u64(to, p->err.next);
    put_text(to, p->reason ? p->reason : "");
    put_text(to, p->tag);
    put_u32(to, p->argc);
    for (uint32_t i = 0; i < p->argc; i++)
        put_text(to, p->argv[i]);
}

static struct process *find(uint64_t id)
{
    for (struct process *p = processes; p; p = p->next)
        if (p->id == id && !p->forgotten)
            return p;
    return NULL;
}

/* The process named first in the body; answers ESRCH when there is none. */
static struct process *named(struct request *request)
{
    uint64_t id = get_u64(&request->body);
    if (request->body.bad)
        return NULL;
    struct process *p = find(id);
    if (!p)
        answer_error(request->id, request->op, ESRCH, STAGE_NONE, "");
    return p;
}

void process_look(struct request *request)
{
    struct process *p = named(request);
    if (p) {
        process_put_state(p, answer_begin(request->id, request->op));
        answer_end();
    }
}

void process_wait(struct request *request)
{
    struct process *p = named(request);
    if (p)
        parked_add(p, request, 0, 0, 0);
}

void process_output(struct request *request)
{
    struct process *p = named(request);
    if (!p)
        return;
    uint64_t out = get_u64(&request->body), err = get_u64(&request->body);
    uint32_t most = get_u32(&request->body);
    if (request->body.bad)
        return;
    stream_taken(&p->out, out);
    stream_taken(&p->err, err);
    parked_add(p, request, out, err, most > PIECE ? PIECE : most ? most : 1);
}

void process_write(struct request *request)
{
    struct process *p = named(request);
    if (!p)
        return;
    uint32_t length;
    const unsigned char *data = get_blob(&request->body, &length);
    if (request->body.bad)
        return;
    if (p->running && p->in.fd < 0 && !p->in_broken) {
        answer_error(request->id, request->op, EBADF, STAGE_NONE, "stdin is not open");
        return;
    }
    bytes_append(&parked_add(p, request, 0, 0, 0)->data, data, length);
}

void process_close_stdin(struct request *request)
{
    struct process *p = named(request);
    if (!p)
        return;
    if (p->pty) {
        static const char end_of_transmission = 4;
        if (p->in.fd >= 0) {
            bytes_append(&p->in_queue, &end_of_transmission, 1);
            process_feed(p);
        }
    } else {
        p->in_eof = true;
        process_feed(p);
    }
    answer_result(request->id, request->op, 0, NULL);
}

void process_signal(struct request *request)
{
    struct process *p = named(request);
    if (!p)
        return;
    int number = (int)get_u32(&request->body);
    bool group = get_u8(&request->body);
    if (request->body.bad)
        return;
    int error = 0;
    if (number < 0 || number >= NSIG) {
        error = EINVAL;
    } else if (p->running) {
        /* The group is not there before setsid in the child, which the start has waited for. */
        if (kill(group ? -p->pid : p->pid, number) < 0)
            error = errno;
    } else if (group) {
        /* Its children may live on in the group; the number may also belong to a newer one. */
        for (struct process *other = processes; other; other = other->next)
            if (other != p && other->pid == p->pid && other->id > p->id)
                error = ESRCH;
        if (!error && kill(-p->pid, number) < 0)
            error = errno;
    } else {
        error = ESRCH;
    }
    answer_result(request->id, request->op, error, error == ESRCH ? "it has ended" : NULL);
}

void process_resize(struct request *request)
{
    struct process *p = named(request);
    if (!p)
        return;
    uint16_t rows = get_u16(&request->body), columns = get_u16(&request->body);
    if (request->body.bad)
        return;
    struct winsize size = {.ws_row = rows, .ws_col = columns};
    int error = 0;
    if (!p->pty)
        error = ENOTTY;
    else if (stream_open(&p->out) && ioctl(p->out.source.fd, TIOCSWINSZ, &size) < 0)
        error = errno;
    answer_result(request->id, request->op, error, NULL);
}

/* Newest first in the list; the node asks for those below the last number it got. */
void process_list(struct request *request)
{
    uint64_t below = get_u64(&request->body);
    if (request->body.bad)
        return;
    struct bytes *to = answer_begin(request->id, request->op);
    size_t count_at = to->length;
    uint32_t count = 0;
    uint8_t more = 0;
    put_u32(to, 0);
    for (struct process *p = processes; p; p = p->next) {
        if (p->forgotten || (below && p->id >= below))
            continue;
        if (to->length > LIST_BYTES) {
            more = 1;
            break;
        }
        process_put_state(p, to);
        count++;
    }
    put_u8(to, more);
    memcpy(to->data + count_at, &count, sizeof count);
    answer_end();
}

/* -- forgetting ------------------------------------------------------------------------------ */

void process_release(struct process *process)
{
    struct process **at = &processes;
    while (*at != process)
        at = &(*at)->next;
    *at = process->next;
    parked_drop(process);
    stream_close(&process->out);
    stream_close(&process->err);
    loop_close(&process->in);
    bytes_free(&process->in_queue);
    free(process->tag);
    free(process->argv);
    free(process);
}

/* While background children hold the pipes, reading goes on and the bytes are thrown away: closing
 * would end those children at their next line. */
static void forget(struct process *p)
{
    parked_drop(p);
    p->forgotten = true;
    p->run_id = 0;
    struct stream *streams[] = {&p->out, &p->err};
    for (int i = 0; i < 2; i++) {
        stream_clear(streams[i]);
        streams[i]->keep = 1;
        streams[i]->lossless = false;
        stream_taken(streams[i], streams[i]->next);
    }
    process_dirty(p);
}

void process_forget(struct request *request)
{
    struct process *p = named(request);
    if (!p)
        return;
    if (p->running) {
        answer_error(request->id, request->op, EBUSY, STAGE_NONE, "it is running");
        return;
    }
    forget(p);
    answer_result(request->id, request->op, 0, NULL);
}

void process_acknowledged(uint64_t id)
{
    for (struct process *p = processes; p; p = p->next)
        if (p->run_id == id && p->run_client == connection_client()) {
            p->run_id = 0;
            /* Nobody else knows a run; but what its background children write stays readable. */
            if (!p->running && !p->run_early && !stream_open(&p->out) && !stream_open(&p->err))
                forget(p);
            return;
        }
}

void process_cancel(uint64_t id)
{
    for (struct process *p = processes; p; p = p->next) {
        for (struct parked **at = &p->parked; *at;) {
            struct parked *one = *at;
            if (one->id == id && one->op != OP_WRITE) {
                *at = one->next;
                bytes_free(&one->data);
                free(one);
            } else {
                at = &one->next;
            }
        }
        if (p->run_id == id && p->run_client == connection_client()) {
            p->run_id = 0;
            if (p->running)
                process_kill_session(p->pid);
        }
    }
}

void process_parked_drop(void)
{
    for (struct process *p = processes; p; p = p->next)
        parked_drop(p);
}

void process_new_client(void)
{
    for (struct process *p = processes; p; p = p->next)
        p->run_id = 0;
}

void records_bound(void)
{
    unsigned ended = 0;
    uint64_t output = 0;
    for (struct process *p = processes, *next; p; p = next) {
        next = p->next;
        if (p->running || p->forgotten || p->parked || p->run_id)
            continue;
        ended++;
        output += p->out.next - p->out.first + p->err.next - p->err.first;
        if (ended > ENDED_KEPT) {
            forget(p);
        } else if (output > ENDED_OUTPUT) {
            /* The record keeps the exit code; its offsets tell that the bytes are gone. */
            stream_clear(&p->out);
            stream_clear(&p->err);
        }
    }
}
