/* Connections of the session that go through the gateway; see tunnels.h for the guarantee. */
#include "tunnels.h"

#include "loop.h"
#include "nat.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define PIECE_SIZE (32u << 10)      /* taken from a program at once */
#define FRAME_LIMIT (64u << 10)     /* body of a frame of the gateway */
#define DOWN_FULL (128u << 10)      /* more is not read from the gateway while this waits */
#define PARKED_LIMIT (1u << 20)     /* what the gateway may still send while letting go */
#define WINDOW_SIZE (256u << 10)    /* sent ahead of a gateway that says what it has passed on */
#define PIECES_AT_ONCE 4
#define PATIENCE (5 * SECOND)       /* for a gateway that is not there (yet) */
#define PAUSE (20 * MS)

enum state {
    DIALING, /* the connection inside is being made */
    WAITING, /* for the node and the gateway */
    OPENING, /* OPEN or RESUME is sent */
    OPEN,
    PARKING, /* DETACH is sent */
    PARKED,
    CLOSING, /* what has come is still passed on */
};

struct tunnel {
    struct source guest, link;
    struct tunnel *next, **self;
    enum state state;
    enum tunnel_kind kind;
    bool resuming;
    uint64_t id;
    uint64_t try_at, give_up; /* WAITING, DIALING */
    uint64_t dial, client;    /* the request that waits for an answer, and whose it is */
    uint64_t sent, received;  /* data: framed for the gateway, taken from it */
    uint64_t window;          /* data the gateway has passed on; NEVER: it does not say */
    struct bytes out;         /* at most one frame of data or an end, and what parks it */
    size_t out_at;
    struct bytes kept; /* that frame, over a freeze */
    struct bytes in, down;
    size_t down_at;
    bool guest_ended, end_received, down_ended;
    struct sockaddr_in server, from; /* a redirected connection */
    uint16_t port, host_length;
    bool tried_ipv6;
    char host[NAME_SIZE];
};

static struct tunnel *tunnels;
static unsigned tunnel_count;
static uint64_t last_id;
static bool may_open; /* the node is there and no freeze is near */
static bool restless; /* a tunnel may be DIALING or WAITING */
static struct sockaddr_un address = {.sun_family = AF_UNIX};

static void guest_ready(struct source *source, uint32_t events);
static void link_ready(struct source *source, uint32_t events);

void tunnels_open(const char *socket_path)
{
    const char *slash = strrchr(socket_path, '/');
    snprintf(address.sun_path, sizeof address.sun_path, "%.*s/net.sock",
             slash ? (int)(slash - socket_path) : 1, slash ? socket_path : ".");
}

static size_t out_waiting(const struct tunnel *t) { return t->out.length - t->out_at; }
static size_t down_waiting(const struct tunnel *t) { return t->down.length - t->down_at; }

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
    *t->self = t->next;
    if (t->next)
        t->next->self = t->self;
    tunnel_count--;
    bytes_free(&t->out);
    bytes_free(&t->kept);
    bytes_free(&t->in);
    bytes_free(&t->down);
    free(t);
}

static void reset_socket(int fd)
{
    struct linger now = {1, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

static void reset(struct tunnel *t, int error)
{
    answer_dial(t, error);
    if (t->link.fd >= 0 && !out_waiting(t)) {
        /* Its end without this says the same, only later. */
        struct tunnel_header header = {.type = TUNNEL_RESET};
        send(t->link.fd, &header, sizeof header, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (t->guest.fd >= 0)
        reset_socket(t->guest.fd);
    release(t);
}

/* -- to the gateway -------------------------------------------------------------------------- */

static void queue(struct tunnel *t, enum tunnel_frame type, const void *body, size_t length)
{
    struct tunnel_header header = {.length = (uint32_t)length, .type = (uint8_t)type};
    bytes_append(&t->out, &header, sizeof header);
    bytes_append(&t->out, body, length);
}

/* False: the connection is broken. */
static bool flush(struct tunnel *t)
{
    while (out_waiting(t)) {
        ssize_t n = send(t->link.fd, t->out.data + t->out_at, out_waiting(t),
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK;
        t->out_at += (size_t)n;
    }
    bytes_free(&t->out);
    t->out_at = 0;
    if (t->state == OPENING)
        answer_dial(t, 0);
    return true;
}

static bool may_send(const struct tunnel *t)
{
    return t->state == OPEN && !t->guest_ended && !out_waiting(t) &&
           (t->window == NEVER || t->sent - t->window < WINDOW_SIZE);
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

static void park(struct tunnel *t)
{
    t->state = PARKING;
    if (out_waiting(t) && !t->out_at) {
        /* Not begun: it follows after the freeze, however full the gateway is now. */
        struct tunnel_header header;
        memcpy(&header, t->out.data, sizeof header);
        if (header.type == TUNNEL_DATA)
            t->sent -= header.length;
        t->kept = t->out;
        memset(&t->out, 0, sizeof t->out);
    }
    queue(t, TUNNEL_DETACH, NULL, 0);
}

static bool opened(struct tunnel *t, struct reader *body)
{
    uint64_t received = get_u64(body);
    if (t->state != OPENING || body->bad || received != t->sent)
        return false;
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
    t->resuming = false;
    if (!may_open)
        park(t); /* asked for meanwhile */
    return true;
}

/* One frame. False: the tunnel is over. */
static bool take(struct tunnel *t, uint8_t type, const unsigned char *body, size_t length)
{
    struct reader reader = {.at = body, .end = body + length};
    if (type == TUNNEL_OPENED)
        return opened(t, &reader);
    if (t->state != OPEN && t->state != PARKING)
        return false; /* refused, or nonsense */
    switch (type) {
    case TUNNEL_DATA:
        if (t->end_received)
            return false;
        return pass_on(t, body, length);
    case TUNNEL_END:
        t->end_received = true;
        return true;
    case TUNNEL_WINDOW: {
        uint64_t passed = get_u64(&reader);
        if (reader.bad || passed > t->sent)
            return false;
        t->window = passed;
        return true;
    }
    case TUNNEL_DETACH:
        if (t->state != PARKING || out_waiting(t))
            return false;
        loop_close(&t->link);
        t->state = PARKED;
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
static void settle(struct tunnel *t)
{
    if (t->state == OPEN && t->guest_ended && t->end_received && !out_waiting(t)) {
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

static int dial_step(struct tunnel *t);

static void guest_ready(struct source *source, uint32_t events)
{
    struct tunnel *t = (struct tunnel *)source; /* the first member */
    if (t->state == DIALING) {
        int error = dial_step(t);
        if (error)
            reset(t, error);
        else
            settle(t);
        return;
    }
    bool well = !(events & EPOLLERR);
    if (well && (events & (EPOLLIN | EPOLLHUP)))
        well = may_send(t) ? pump(t) : !(events & EPOLLHUP);
    if (well && (events & EPOLLOUT))
        well = drain(t);
    if (well)
        settle(t);
    else
        reset(t, ECONNRESET);
}

static void link_ready(struct source *source, uint32_t events)
{
    struct tunnel *t =
        (struct tunnel *)((unsigned char *)source - offsetof(struct tunnel, link));
    bool well = true;
    if (events & EPOLLOUT)
        well = flush(t);
    if (well && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        well = may_receive(t) ? receive(t) : !(events & EPOLLERR);
    if (well && may_send(t) && t->window != NEVER)
        well = pump(t); /* there may be room now for what was held back */
    if (well)
        settle(t);
    else
        reset(t, ECONNRESET);
}

/* -- begin ----------------------------------------------------------------------------------- */

static struct tunnel *create(int fd, enum tunnel_kind kind)
{
    struct tunnel *t = checked_calloc(1, sizeof *t);
    t->guest = (struct source){.fd = fd, .ready = guest_ready};
    t->link = (struct source){.fd = -1, .ready = link_ready};
    t->kind = kind;
    t->state = WAITING;
    t->window = NEVER;
    t->give_up = now_ns() + PATIENCE;
    restless = true;
    t->next = tunnels;
    t->self = &tunnels;
    if (tunnels)
        tunnels->self = &t->next;
    tunnels = t;
    tunnel_count++;
    return t;
}

static void put_first(struct tunnel *t)
{
    struct bytes body = {0};
    if (t->resuming) {
        put_u64(&body, t->id);
        put_u64(&body, t->received);
        put_u64(&body, t->sent);
    } else {
        t->id = ++last_id;
        put_u64(&body, t->id);
        put_u8(&body, (uint8_t)t->kind);
        put_u16(&body, t->port);
        put_u16(&body, t->host_length);
        bytes_append(&body, t->host, t->host_length);
    }
    queue(t, t->resuming ? TUNNEL_RESUME : TUNNEL_OPEN, body.data, body.length);
    bytes_free(&body);
}

static void open_link(struct tunnel *t)
{
    uint64_t now = now_ns();
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
        int error = errno;
        if (fd >= 0)
            close(fd);
        t->try_at = now + PAUSE;
        if (now >= t->give_up)
            reset(t, error);
        return;
    }
    t->link.fd = fd;
    t->state = OPENING;
    put_first(t);
    if (flush(t))
        settle(t);
    else
        reset(t, ECONNRESET);
}

void tunnels_accepted(int fd, const struct sockaddr_in *server)
{
    if (tunnel_count >= MOST_TUNNELS) {
        reset_socket(fd);
        close(fd);
        return;
    }
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct tunnel *t = create(fd, server ? TUNNEL_CONNECT : TUNNEL_PROXY);
    if (server) {
        socklen_t size = sizeof t->from;
        const char *name = names_of(server->sin_addr);
        t->server = *server;
        t->port = ntohs(server->sin_port);
        if (name)
            snprintf(t->host, sizeof t->host, "%s", name);
        else
            inet_ntop(AF_INET, &server->sin_addr, t->host, sizeof t->host);
        t->host_length = (uint16_t)strlen(t->host);
        getpeername(fd, (struct sockaddr *)&t->from, &size);
    }
    if (may_open)
        open_link(t);
}

/* -- connections into the session ------------------------------------------------------------ */

static int begin_dial(struct tunnel *t)
{
    struct sockaddr_in four = {.sin_family = AF_INET,
                               .sin_port = htons(t->port),
                               .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6,
                               .sin6_port = htons(t->port),
                               .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(t->tried_ipv6 ? AF_INET6 : AF_INET,
                    SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errno;
    loop_close(&t->guest);
    t->guest.fd = fd;
    int failed = t->tried_ipv6 ? connect(fd, (struct sockaddr *)&six, sizeof six)
                               : connect(fd, (struct sockaddr *)&four, sizeof four);
    return failed && errno != EINPROGRESS ? errno : 0;
}

static int dial_step(struct tunnel *t)
{
    int error = 0, on = 1;
    socklen_t size = sizeof error;
    getsockopt(t->guest.fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error && !t->tried_ipv6) {
        t->tried_ipv6 = true;
        return begin_dial(t) ? error : 0; /* what the first said is what matters */
    }
    if (error)
        return error;
    setsockopt(t->guest.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    loop_unwatch(&t->guest);
    t->state = WAITING;
    t->try_at = 0; /* the next turn opens it */
    return 0;
}

void tunnels_dial(struct request *request)
{
    unsigned char token[TOKEN_SIZE];
    for (unsigned i = 0; i < TOKEN_SIZE; i++)
        token[i] = get_u8(&request->body);
    uint16_t port = get_u16(&request->body);
    if (request->body.bad)
        return;
    if (tunnel_count >= MOST_TUNNELS) {
        answer_error(request->id, request->op, EAGAIN, STAGE_NONE, "too many connections");
        return;
    }
    struct tunnel *t = create(-1, TUNNEL_INBOUND);
    memcpy(t->host, token, TOKEN_SIZE);
    t->host_length = TOKEN_SIZE;
    t->port = port;
    t->dial = request->id;
    t->client = connection_client();
    t->state = DIALING;
    int error = begin_dial(t);
    if (error) {
        t->tried_ipv6 = true;
        if (begin_dial(t)) {
            reset(t, error);
            return;
        }
    }
    settle(t);
}

bool tunnels_dialing(uint64_t id)
{
    for (struct tunnel *t = tunnels; t; t = t->next)
        if (t->dial == id && t->client == connection_client())
            return true;
    return false;
}

/* -- around a freeze ------------------------------------------------------------------------- */

void tunnels_park(void)
{
    may_open = false;
    for (struct tunnel *t = tunnels, *next; t; t = next) {
        next = t->next;
        if (t->state == OPENING && !t->resuming) {
            /* Nothing of it is under way: it is opened anew; but its token was for once. */
            if (t->kind == TUNNEL_INBOUND) {
                reset(t, ECONNABORTED);
                continue;
            }
            loop_close(&t->link);
            bytes_free(&t->out);
            t->out_at = 0;
            bytes_free(&t->in);
            t->state = WAITING;
        } else if (t->state == OPEN) {
            park(t);
            if (!flush(t)) {
                reset(t, ECONNRESET);
                continue;
            }
        }
        settle(t);
    }
}

bool tunnels_parked(void)
{
    for (struct tunnel *t = tunnels; t; t = t->next)
        if (t->link.fd >= 0)
            return false;
    return true;
}

void tunnels_park_end(void)
{
    for (struct tunnel *t = tunnels, *next; t; t = next) {
        next = t->next;
        if (t->link.fd >= 0)
            reset(t, ECONNABORTED);
    }
}

void tunnels_attached(void)
{
    may_open = restless = true;
    for (struct tunnel *t = tunnels; t; t = t->next) {
        if (t->state == PARKED) {
            t->state = WAITING;
            t->resuming = true;
        }
        /* The time that a freeze took is nobody's patience. */
        if (t->state == WAITING || t->state == DIALING) {
            t->give_up = now_ns() + PATIENCE;
            t->try_at = 0;
        }
    }
}

void tunnels_reset(bool inbound, bool poke)
{
    for (struct tunnel *t = tunnels, *next; t; t = next) {
        next = t->next;
        if (t->kind == TUNNEL_INBOUND && !inbound)
            continue;
        if (poke && t->kind == TUNNEL_CONNECT)
            nat_poke(&t->server, &t->from);
        reset(t, ECONNABORTED);
    }
}

uint64_t tunnels_timers(uint64_t now)
{
    uint64_t deadline = NEVER;
    if (!restless)
        return deadline;
    restless = false;
    for (struct tunnel *t = tunnels, *next; t; t = next) {
        next = t->next;
        if (t->state == DIALING && now >= t->give_up) {
            reset(t, ETIMEDOUT);
            continue;
        }
        if (t->state == WAITING && may_open && now >= t->try_at)
            open_link(t); /* may free it, and only it */
    }
    for (struct tunnel *t = tunnels; t; t = t->next) {
        restless |= t->state == DIALING || t->state == WAITING;
        uint64_t due = t->state == DIALING ? t->give_up : NEVER;
        if (t->state == WAITING && may_open)
            due = t->try_at;
        if (due < deadline)
            deadline = due;
    }
    return deadline;
}
