/* The one connection to the node; see connection.h for the guarantee. */
#include "connection.h"

#include "dispatch.h"
#include "loop.h"
#include "network.h"
#include "process.h"
#include "state.h"
#include "tunnels.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define OUT_LIMIT (4u << 20)   /* stop taking requests while this much waits to be sent */
#define OUT_COMFORT (1u << 20) /* producers of long answers pause above this */
#define KEPT_LIMIT 4096        /* answers kept for a repeat */
#define PARK_PATIENCE SECOND /* for the gateway; a tunnel it still holds then is reset */

static void ready(struct source *source, uint32_t events);

static struct source link_source = {.fd = -1, .ready = ready};
static struct sockaddr_un address = {.sun_family = AF_UNIX};
static struct bytes in, out;
static size_t in_at, out_at;
static bool attached, leaving, broken;
static uint64_t next_try, pause_ns, lost_at;
static uint64_t detach_id, park_until; /* a detach that waits for the tunnels; 0: none */
static unsigned char client[CLIENT_ID_SIZE];
static uint64_t client_number;

static struct bytes frame; /* the answer being built */

struct kept {
    struct kept *next;
    uint64_t id;
    struct bytes frame;
};
static struct kept *kept_first, **kept_last = &kept_first;
static unsigned kept_count;

void connection_open(const char *socket_path)
{
    strncpy(address.sun_path, socket_path, sizeof address.sun_path - 1);
    lost_at = now_ns();
    next_try = lost_at;
    pause_ns = MS;
}

bool connection_up(void) { return attached; }
bool connection_full(void) { return out.length - out_at > OUT_COMFORT; }
uint64_t connection_client(void) { return client_number; }

static void kept_drop(struct kept **at)
{
    struct kept *old = *at;
    *at = old->next;
    if (kept_last == &old->next)
        kept_last = at;
    bytes_free(&old->frame);
    free(old);
    kept_count--;
}

static void acknowledge(uint64_t id)
{
    if (!id)
        return;
    for (struct kept **at = &kept_first; *at; at = &(*at)->next)
        if ((*at)->id == id) {
            kept_drop(at);
            return;
        }
    dispatch_acknowledged(id);
}

static void drop_connection(void)
{
    loop_close(&link_source);
    bytes_free(&in);
    bytes_free(&out);
    in_at = out_at = 0;
    attached = leaving = broken = false;
    detach_id = 0;
    tunnels_park_end();
    dispatch_parked_drop();
    loop_renew(); /* what memory keeps of removed sources no restore can bring back */
    lost_at = now_ns();
    next_try = lost_at + MS;
    pause_ns = 2 * MS;
}

static void flush(void)
{
    while (link_source.fd >= 0 && out_at < out.length) {
        ssize_t n = send(link_source.fd, out.data + out_at, out.length - out_at,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        if (n <= 0) {
            broken = true;
            break;
        }
        out_at += (size_t)n;
    }
    if (out_at == out.length) {
        out.length = out_at = 0;
        if (out.capacity > 65536)
            bytes_free(&out);
    } else if (out_at > OUT_COMFORT) {
        bytes_drop_front(&out, out_at);
        out_at = 0;
    }
}

/* -- answers --------------------------------------------------------------------------------- */

static void frame_begin(uint64_t id, uint16_t op)
{
    struct frame_header header = {.op = op, .id = id};
    if (frame.capacity > 2 * MAX_BODY)
        bytes_free(&frame);
    frame.length = 0;
    bytes_append(&frame, &header, sizeof header);
}

static void frame_send(uint16_t status, bool keep)
{
    struct frame_header *header = (struct frame_header *)frame.data;
    header->length = (uint32_t)(frame.length - sizeof *header);
    header->status = status;
    if (keep) {
        struct kept *one = checked_calloc(1, sizeof *one);
        one->id = header->id;
        bytes_append(&one->frame, frame.data, frame.length);
        *kept_last = one;
        kept_last = &one->next;
        if (++kept_count > KEPT_LIMIT)
            kept_drop(&kept_first);
    }
    if (link_source.fd >= 0)
        bytes_append(&out, frame.data, frame.length);
}

struct bytes *answer_begin(uint64_t id, uint16_t op)
{
    frame_begin(id, op);
    return &frame;
}

static void finish(uint16_t status)
{
    const struct frame_header *header = (const struct frame_header *)frame.data;
    /* The answer of a run that started is rebuilt from its process; only a refusal is kept. */
    bool keep = op_mutates(header->op) || (header->op == OP_RUN && status);
    frame_send(status, keep);
}

void answer_end(void) { finish(0); }
void answer_end_more(void) { finish(STATUS_MORE); }

void answer_error(uint64_t id, uint16_t op, int error, enum stage stage, const char *about)
{
    frame_begin(id, op);
    put_u8(&frame, (uint8_t)stage);
    put_text(&frame, about ? about : "");
    finish((uint16_t)error);
}

void answer_result(uint64_t id, uint16_t op, int error, const char *about)
{
    if (error) {
        answer_error(id, op, error, STAGE_NONE, about);
    } else {
        frame_begin(id, op);
        finish(0);
    }
}

/* -- requests -------------------------------------------------------------------------------- */

static void attach(struct request *request)
{
    uint16_t version = get_u16(&request->body);
    uint32_t length;
    const unsigned char *id = get_blob(&request->body, &length);
    if (request->body.bad || version != WIRE_VERSION || length != CLIENT_ID_SIZE) {
        broken = true;
        return;
    }
    if (memcmp(client, id, CLIENT_ID_SIZE) != 0) {
        /* Another node process: the numbers of the old one mean nothing any more. */
        memcpy(client, id, CLIENT_ID_SIZE);
        client_number++;
        while (kept_first)
            kept_drop(&kept_first);
        dispatch_new_client();
    }
    attached = true;
    answer_result(request->id, request->op, 0, NULL);
    tunnels_attached();
}

static void acknowledge_many(struct reader *body)
{
    while (!body->bad && body->at < body->end)
        acknowledge(get_u64(body));
}

static bool repeat(uint64_t id)
{
    for (struct kept *one = kept_first; one; one = one->next)
        if (one->id == id) {
            bytes_append(&out, one->frame.data, one->frame.length);
            return true;
        }
    return false;
}

static void take_frame(const struct frame_header *header, const unsigned char *body)
{
    struct request request = {
        .id = header->id, .op = header->op, .body = {.at = body, .end = body + header->length}};
    acknowledge(header->ack);
    if (!attached && header->op != OP_ATTACH) {
        broken = true;
        return;
    }
    switch (header->op) {
    case OP_ATTACH:
        attach(&request);
        return;
    case OP_ACK:
        acknowledge_many(&request.body);
        return;
    case OP_DETACH:
        acknowledge_many(&request.body);
        detach_id = request.id;
        park_until = now_ns() + PARK_PATIENCE;
        tunnels_park();
        return;
    default:
        if ((op_mutates(request.op) || request.op == OP_RUN) && repeat(request.id))
            return;
        if (!dispatch(&request))
            broken = true;
    }
}

static void take_frames(void)
{
    struct frame_header header;
    while (!broken && !leaving && !detach_id && in.length - in_at >= sizeof header &&
           out.length - out_at < OUT_LIMIT) {
        memcpy(&header, in.data + in_at, sizeof header);
        if (header.length > MAX_BODY) {
            broken = true;
            return;
        }
        size_t whole = sizeof header + header.length;
        if (in.length - in_at < whole)
            break;
        take_frame(&header, in.data + in_at + sizeof header);
        in_at += whole;
    }
    if (in_at) {
        bytes_drop_front(&in, in_at);
        in_at = 0;
    }
}

static void receive(void)
{
    size_t room = 65536;
    if (in.length >= sizeof(struct frame_header)) {
        const struct frame_header *header = (const struct frame_header *)in.data;
        if (header->length <= MAX_BODY && sizeof *header + header->length > in.length + room)
            room = sizeof *header + header->length - in.length;
    }
    bytes_reserve(&in, room);
    ssize_t n = recv(link_source.fd, in.data + in.length, in.capacity - in.length, MSG_DONTWAIT);
    if (n > 0)
        in.length += (size_t)n;
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        broken = true;
}

static void ready(struct source *source, uint32_t events)
{
    (void)source;
    if (events & EPOLLIN) {
        receive();
        if (!broken)
            take_frames();
    } else if (events & (EPOLLERR | EPOLLHUP)) {
        broken = true;
    }
}

/* -- connecting ------------------------------------------------------------------------------ */

static void try_connect(uint64_t now)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && !connect(fd, (struct sockaddr *)&address, sizeof address)) {
        link_source.fd = fd;
        network_woken(); /* nobody has come while it was frozen: it may have been restored */
        frame_begin(0, OP_HELLO);
        state_put_hello(&frame);
        frame_send(0, false);
        loop_watch(&link_source, EPOLLIN);
        return;
    }
    if (fd >= 0)
        close(fd);
    /* A freeze takes place right after a detach, so a restored sandbox wakes up in the first,
     * quick phase; when nobody comes for long, the node is away and idling must cost nothing. */
    if (now - lost_at > 2 * SECOND && pause_ns < 50 * MS)
        pause_ns += pause_ns / 8;
    else if (pause_ns >= 50 * MS && pause_ns < 500 * MS)
        pause_ns += pause_ns / 64; /* by tries, not by the clock, which counts the time frozen */
    next_try = now + pause_ns;
}

uint64_t connection_deadline(void)
{
    if (link_source.fd < 0)
        return next_try;
    return detach_id ? park_until : NEVER;
}

void connection_serve(uint64_t now)
{
    if (link_source.fd < 0) {
        if (now >= next_try)
            try_connect(now);
        if (link_source.fd < 0)
            return;
    }
    if (detach_id && (tunnels_parked() || now >= park_until)) {
        tunnels_park_end();
        process_hurry(); /* whoever is left waiting knows at least which command it waits for */
        answer_result(detach_id, OP_DETACH, 0, NULL);
        detach_id = 0;
        leaving = true;
    }
    size_t waiting = out.length - out_at;
    flush();
    if (!broken && waiting >= OUT_LIMIT && out.length - out_at < OUT_LIMIT)
        take_frames(); /* requests that were held back */
    if (broken || (leaving && out_at == out.length)) {
        drop_connection();
        return;
    }
    uint32_t events = 0;
    if (out.length - out_at < OUT_LIMIT && !leaving)
        events |= EPOLLIN;
    if (out_at < out.length)
        events |= EPOLLOUT;
    loop_watch(&link_source, events);
}
