/* The bytes of one tunnel, both ways; see tunnels.h for the guarantee. */
#include "tunnel.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define PIECE_SIZE (32u << 10)      /* taken from a program at once */
#define FRAME_LIMIT (64u << 10)     /* body of a frame of the gateway */
#define DOWN_FULL (128u << 10)      /* more is not read from the gateway while this waits */
#define PARKED_LIMIT (1u << 20)     /* what the gateway may still send while letting go */
#define PIECES_AT_ONCE 4

static size_t out_waiting(const struct tunnel *t) { return t->out.length - t->out_at; }
static size_t down_waiting(const struct tunnel *t) { return t->down.length - t->down_at; }

/* The program has said all, and the gateway was sent all of it. */
static bool said_all(const struct tunnel *t) { return t->guest_ended && !t->kept.length; }

/* -- end ------------------------------------------------------------------------------------- */

static void answer_dial(struct tunnel *t, int error)
{
    if (!t->dial)
        return;
    char about[32];
    snprintf(about, sizeof about, "port %u", t->port);
    if (t->client == connection_client())
        answer_result(t->dial, OP_DIAL, error, about);
    t->dial = 0;
}

static void release(struct tunnel *t)
{
    loop_close(&t->guest);
    loop_close(&t->link);
    tunnel_forget(t);
    bytes_free(&t->out);
    bytes_free(&t->kept);
    bytes_free(&t->in);
    bytes_free(&t->down);
    free(t);
}

void tunnel_reset_at_close(int fd)
{
    struct linger now = {1, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

void tunnel_reset(struct tunnel *t, int error)
{
    answer_dial(t, error);
    if (t->link.fd >= 0 && !out_waiting(t)) {
        /* Its end without this says the same, only later. */
        struct tunnel_header header = {.type = TUNNEL_RESET};
        send(t->link.fd, &header, sizeof header, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (t->guest.fd >= 0)
        tunnel_reset_at_close(t->guest.fd);
    release(t);
}

/* -- to the gateway -------------------------------------------------------------------------- */

void tunnel_queue(struct tunnel *t, enum tunnel_frame type, const void *body, size_t length)
{
    struct tunnel_header header = {.length = (uint32_t)length, .type = (uint8_t)type};
    bytes_append(&t->out, &header, sizeof header);
    bytes_append(&t->out, body, length);
}

/* False: the connection is broken. */
bool tunnel_flush(struct tunnel *t)
{
    while (out_waiting(t)) {
        ssize_t n = send(t->link.fd, t->out.data + t->out_at, out_waiting(t),
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return true;
        if (n < 0 && (t->state != PARKING || !said_all(t)))
            return false;
        if (n < 0)
            break; /* gone, as it may when both have said all; what it said is still to be read */
        t->out_at += (size_t)n;
    }
    bytes_free(&t->out);
    t->out_at = 0;
    answer_dial(t, 0); /* what went out was its first frame */
    return true;
}

static bool may_send(const struct tunnel *t)
{
    return t->state == OPEN && !t->guest_ended && !out_waiting(t);
}

/* Takes what the program has written. False: either end is broken. */
static bool pump(struct tunnel *t)
{
    /* What fits into the socket at once needs no memory of the tunnel's own. */
    static unsigned char piece[sizeof(struct tunnel_header) + PIECE_SIZE];
    for (int i = 0; i < PIECES_AT_ONCE && may_send(t); i++) {
        struct tunnel_header header = {.type = TUNNEL_DATA};
        ssize_t n = recv(t->guest.fd, piece + sizeof header, PIECE_SIZE, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            return true;
        if (n < 0)
            return false;
        if (n > 0) {
            header.length = (uint32_t)n;
            t->sent += (size_t)n;
        } else {
            header.type = TUNNEL_END;
            t->guest_ended = true;
        }
        memcpy(piece, &header, sizeof header);
        size_t whole = sizeof header + (size_t)n;
        n = send(t->link.fd, piece, whole, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
            return false;
        size_t done = n > 0 ? (size_t)n : 0;
        /* Whole, with what is gone of it marked so: parking looks whether it was begun. */
        if (done < whole) {
            bytes_append(&t->out, piece, whole);
            t->out_at = done;
        }
    }
    return true;
}

/* -- from the gateway ------------------------------------------------------------------------ */

/* Passes on what has come. False: the program's end is broken. */
static bool drain(struct tunnel *t)
{
    while (down_waiting(t)) {
        ssize_t n = send(t->guest.fd, t->down.data + t->down_at, down_waiting(t),
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return true;
        if (n < 0)
            return false;
        t->down_at += (size_t)n;
    }
    bytes_free(&t->down);
    t->down_at = 0;
    if (t->end_received && !t->down_ended) {
        t->down_ended = true;
        if (shutdown(t->guest.fd, SHUT_WR) < 0)
            return false;
    }
    return true;
}

/* Data for the program: at once as far as it takes it. False: its end is broken. */
static bool pass_on(struct tunnel *t, const unsigned char *data, size_t length)
{
    t->received += length;
    if (!down_waiting(t)) {
        ssize_t n = send(t->guest.fd, data, length, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
            return false;
        data += n > 0 ? n : 0;
        length -= n > 0 ? (size_t)n : 0;
    }
    if (t->down_at > DOWN_FULL) {
        bytes_drop_front(&t->down, t->down_at);
        t->down_at = 0;
    }
    bytes_append(&t->down, data, length);
    return true;
}

void tunnel_park(struct tunnel *t)
{
    if (t->state == OPEN && out_waiting(t) && !t->out_at) {
        /* Not begun: it follows after the freeze, however full the gateway is now. */
        struct tunnel_header header;
        memcpy(&header, t->out.data, sizeof header);
        if (header.type == TUNNEL_DATA)
            t->sent -= header.length;
        t->kept = t->out;
        memset(&t->out, 0, sizeof t->out);
    }
    t->state = PARKING;
    tunnel_queue(t, TUNNEL_DETACH, NULL, 0);
}

static bool opened(struct tunnel *t, struct reader *body)
{
    uint64_t received = get_u64(body);
    if (t->stands || body->bad || received != t->sent)
        return false;
    t->stands = true;
    if (t->state != OPENING)
        return true; /* it is being parked meanwhile */
    t->state = OPEN;
    if (t->kept.length) {
        struct tunnel_header header;
        bytes_free(&t->out);
        t->out = t->kept;
        t->out_at = 0;
        memset(&t->kept, 0, sizeof t->kept);
        memcpy(&header, t->out.data, sizeof header);
        if (header.type == TUNNEL_DATA)
            t->sent += header.length;
    }
    return true;
}

/* One frame. False: the tunnel is over. */
static bool take(struct tunnel *t, uint8_t type, const unsigned char *body, size_t length)
{
    struct reader reader = {.at = body, .end = body + length};
    if (type == TUNNEL_OPENED)
        return opened(t, &reader);
    if (type == TUNNEL_DETACH && t->state == PARKING && !out_waiting(t)) {
        loop_close(&t->link);
        /* With nothing left to be said, the gateway has no tunnel any more to be taken up again. */
        t->state = said_all(t) && t->end_received ? CLOSING : PARKED;
        return true;
    }
    if (!t->stands)
        return false; /* refused, or nonsense */
    switch (type) {
    case TUNNEL_DATA:
        if (t->end_received)
            return false;
        return pass_on(t, body, length);
    case TUNNEL_END:
        t->end_received = true;
        return true;
    default:
        return false;
    }
}

static bool take_frames(struct tunnel *t, const unsigned char *data, size_t size)
{
    size_t at = 0;
    struct tunnel_header header;
    while (t->link.fd >= 0 && size - at >= sizeof header) {
        memcpy(&header, data + at, sizeof header);
        if (header.length > FRAME_LIMIT)
            return false;
        if (size - at < sizeof header + header.length)
            break;
        if (!take(t, header.type, data + at + sizeof header, header.length))
            return false;
        at += sizeof header + header.length;
    }
    bytes_free(&t->in);
    bytes_append(&t->in, data + at, t->link.fd >= 0 ? size - at : 0);
    return true;
}

static bool may_receive(const struct tunnel *t)
{
    return t->state == OPENING || t->state == PARKING ||
           (t->state == OPEN && down_waiting(t) < DOWN_FULL);
}

/* Reads what has come. False: the tunnel is over. */
static bool receive(struct tunnel *t)
{
    /* One for all: what is left of a frame is less than a whole one, and kept by the tunnel. */
    static unsigned char data[sizeof(struct tunnel_header) + FRAME_LIMIT];
    size_t had = t->in.length;
    if (had)
        memcpy(data, t->in.data, had);
    ssize_t n = recv(t->link.fd, data + had, sizeof data - had, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return true;
    if (n <= 0 || !take_frames(t, data, had + (size_t)n))
        return false;
    return drain(t) && down_waiting(t) <= PARKED_LIMIT;
}

/* -- events ---------------------------------------------------------------------------------- */

static void want(struct source *source, uint32_t events)
{
    /* Watched for nothing, the end of a peer would still be told, again and again. */
    if (source->fd >= 0 && events)
        loop_watch(source, events);
    else if (source->fd >= 0)
        loop_unwatch(source);
}

/* After whatever happened to it: ends it when both directions are over, else waits for more. */
void tunnel_settle(struct tunnel *t)
{
    if ((t->state == OPEN || t->state == PARKING) && said_all(t) && t->end_received &&
        !out_waiting(t)) {
        loop_close(&t->link);
        t->state = CLOSING;
    }
    if (t->state == CLOSING && t->down_ended) {
        release(t);
        return;
    }
    if (t->state == DIALING) {
        want(&t->guest, EPOLLOUT);
        return;
    }
    uint32_t guest = 0, link = 0;
    if (may_send(t))
        guest |= EPOLLIN;
    if (down_waiting(t) && t->state != PARKED)
        guest |= EPOLLOUT;
    if (may_receive(t))
        link |= EPOLLIN;
    if (out_waiting(t))
        link |= EPOLLOUT;
    want(&t->guest, guest);
    want(&t->link, link);
}

void tunnel_guest_ready(struct source *source, uint32_t events)
{
    struct tunnel *t = (struct tunnel *)source; /* the first member */
    if (t->state == DIALING) {
        int error = tunnel_dialed(t);
        if (error)
            tunnel_reset(t, error);
        else
            tunnel_settle(t);
        return;
    }
    bool well = true;
    /* What came before a reset is still there to be read. */
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        well = may_send(t) ? pump(t) : !(events & (EPOLLHUP | EPOLLERR));
    if (well && (events & EPOLLOUT))
        well = drain(t);
    if (well)
        tunnel_settle(t);
    else
        tunnel_reset(t, ECONNRESET);
}

void tunnel_link_ready(struct source *source, uint32_t events)
{
    struct tunnel *t =
        (struct tunnel *)((unsigned char *)source - offsetof(struct tunnel, link));
    bool well = true;
    if (events & EPOLLOUT)
        well = tunnel_flush(t);
    if (well && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        well = may_receive(t) ? receive(t) : !(events & EPOLLERR);
    if (well)
        tunnel_settle(t);
    else
        tunnel_reset(t, ECONNRESET);
}
