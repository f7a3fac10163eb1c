/* Requests about a process that wait for their answer; see parked.h for the guarantee. */
#include "parked.h"

#include <errno.h>
#include <stdlib.h>

#define SIBLING_BUDGET 65536

struct parked *parked_add(struct process *process, const struct request *request, uint64_t out,
                          uint64_t err, uint32_t most)
{
    struct parked *one = checked_calloc(1, sizeof *one);
    one->id = request->id;
    one->op = request->op;
    one->out = out;
    one->err = err;
    one->most = most;
    struct parked **at = &process->parked;
    while (*at)
        at = &(*at)->next;
    *at = one; /* input is taken in the order in which it came */
    process_dirty(process);
    return one;
}

bool parked_writes(const struct process *process)
{
    for (const struct parked *one = process->parked; one; one = one->next)
        if (one->op == OP_WRITE)
            return true;
    return false;
}

static void release(struct parked **at)
{
    struct parked *one = *at;
    *at = one->next;
    bytes_free(&one->data);
    free(one);
}

void parked_drop(struct process *process)
{
    while (process->parked)
        release(&process->parked);
}

static bool over(const struct process *p)
{
    /* A stream held back for its reader cannot settle, and must not hide the end. */
    return !p->running && (p->settled || p->out.held || p->err.held);
}

static bool serve_wait(const struct process *p, const struct parked *one)
{
    if (!over(p))
        return false;
    process_put_state(p, answer_begin(one->id, one->op));
    answer_end();
    return true;
}

/* All output with the end; of a lossless command what is there, as soon as more is pending than
 * fits or it takes long: the reader goes on by offset. */
static bool serve_run(struct process *p, const struct parked *one)
{
    uint64_t length = p->out.next - p->out.first + p->err.next - p->err.first;
    bool late = p->running && now_ns() >= p->run_until;
    bool early = p->out.lossless && !p->settled
                 && (late || length >= RUN_INLINE || p->out.held || p->err.held);
    if (!over(p) && !early)
        return false;
    p->run_early = early || length > RUN_INLINE;
    struct bytes *to = answer_begin(one->id, one->op);
    process_put_state(p, to);
    put_u8(to, p->run_early);
    size_t out = stream_put(&p->out, 0, RUN_INLINE, to);
    stream_put(&p->err, 0, RUN_INLINE - out, to);
    answer_end();
    return true;
}

static bool serve_output(struct process *p, const struct parked *one)
{
    bool some = one->out < p->out.next || one->err < p->err.next;
    if (!some && !p->settled)
        return false;
    /* Both streams often move together; one answer for both saves a round trip. */
    if (some && stream_open(&p->out) && !p->out.held)
        stream_fill(&p->out, SIBLING_BUDGET);
    if (some && stream_open(&p->err) && !p->err.held)
        stream_fill(&p->err, SIBLING_BUDGET);
    struct bytes *to = answer_begin(one->id, one->op);
    size_t flag_at = to->length;
    put_u8(to, 0);
    put_u64(to, p->out.first);
    put_u64(to, p->err.first);
    uint64_t out = one->out > p->out.first ? one->out : p->out.first;
    uint64_t err = one->err > p->err.first ? one->err : p->err.first;
    size_t out_length = stream_put(&p->out, out, one->most, to);
    size_t err_length = stream_put(&p->err, err, one->most - out_length, to);
    bool all = out + out_length >= p->out.next && err + err_length >= p->err.next;
    to->data[flag_at] = (uint8_t)((p->settled && all ? 1 : 0) | (p->running ? 2 : 0));
    answer_end();
    return true;
}

static bool serve_write(struct process *p, const struct parked *one)
{
    if (p->in.fd >= 0 && p->in_queue.length && p->in_queue.length + one->data.length > STDIN_QUEUE)
        return false;
    bool discarded = p->in.fd < 0;
    if (!discarded) {
        bytes_append(&p->in_queue, one->data.data, one->data.length);
        process_feed(p);
        discarded = p->in_broken;
    }
    put_u8(answer_begin(one->id, one->op), discarded);
    answer_end();
    return true;
}

void parked_serve(struct process *p)
{
    bool writes_wait = false;
    for (struct parked **at = &p->parked; *at;) {
        struct parked *one = *at;
        bool done = false;
        if (one->op == OP_OUTPUT) {
            done = !connection_full() && serve_output(p, one);
        } else if (one->op == OP_WRITE) {
            done = !writes_wait && serve_write(p, one);
            writes_wait |= !done;
        } else {
            done = one->op == OP_RUN ? serve_run(p, one) : serve_wait(p, one);
        }
        if (done)
            release(at);
        else
            at = &one->next;
    }
    if (p->in_eof && p->in.fd >= 0 && !parked_writes(p))
        process_feed(p);
}
