/* Connections of the session that go through the gateway; see tunnels.h for the guarantee. */
#include "tunnel.h"

#include "nat.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define SETTLE_US 5000
#define PATIENCE (5 * SECOND)       /* for a gateway that is not there (yet) */
#define PAUSE (20 * MS)

static struct tunnel *tunnels;
static unsigned tunnel_count;
static uint64_t last_id;
static bool may_open; /* the node is there and no freeze is near */
static struct source herald = {.fd = -1}; /* tells the gateway that a freeze is near */
static bool restless; /* a tunnel may be DIALING or WAITING */
static struct sockaddr_un address = {.sun_family = AF_UNIX};

void tunnels_open(const char *socket_path)
{
    const char *slash = strrchr(socket_path, '/');
    snprintf(address.sun_path, sizeof address.sun_path, "%.*s/net.sock",
             slash ? (int)(slash - socket_path) : 1, slash ? socket_path : ".");
}

void tunnel_forget(struct tunnel *t)
{
    *t->self = t->next;
    if (t->next)
        t->next->self = t->self;
    tunnel_count--;
}

/* -- begin ----------------------------------------------------------------------------------- */

static struct tunnel *create(int fd, enum tunnel_kind kind)
{
    struct tunnel *t = checked_calloc(1, sizeof *t);
    t->guest = (struct source){.fd = fd, .ready = tunnel_guest_ready};
    t->link = (struct source){.fd = -1, .ready = tunnel_link_ready};
    t->kind = kind;
    t->state = WAITING;
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
    if (t->known) {
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
    tunnel_queue(t, t->known ? TUNNEL_RESUME : TUNNEL_OPEN, body.data, body.length);
    bytes_free(&body);
    t->known = true;
    t->stands = false;
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
            tunnel_reset(t, error);
        return;
    }
    t->link.fd = fd;
    t->state = OPENING;
    put_first(t);
    if (tunnel_flush(t))
        tunnel_settle(t);
    else
        tunnel_reset(t, ECONNRESET);
}

void tunnels_refuse(int fd)
{
    tunnel_reset_at_close(fd);
    close(fd);
}

void tunnels_accepted(int fd, const struct sockaddr_in *server)
{
    if (tunnel_count >= MOST_TUNNELS) {
        tunnels_refuse(fd);
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

int tunnel_dialed(struct tunnel *t)
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
            tunnel_reset(t, error);
            return;
        }
    }
    tunnel_settle(t);
}

bool tunnels_dialing(uint64_t id)
{
    for (struct tunnel *t = tunnels; t; t = t->next)
        if (t->dial == id && t->client == connection_client())
            return true;
    return false;
}

/* -- around a freeze ------------------------------------------------------------------------- */

static void herald_ready(struct source *source, uint32_t events)
{
    (void)events;
    loop_close(source); /* whatever it says, it has heard */
}

/* A gateway that has enough of what a program sends does not read on, and would find the last frame
 * too late; told so here, it does. */
static void announce(void)
{
    struct tunnel_header detach = {.type = TUNNEL_DETACH};
    if (herald.fd >= 0)
        return;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0 ||
        send(fd, &detach, sizeof detach, MSG_NOSIGNAL) != (ssize_t)sizeof detach) {
        if (fd >= 0)
            close(fd); /* it goes without, when there is room */
        return;
    }
    herald = (struct source){.fd = fd, .ready = herald_ready};
    loop_watch(&herald, EPOLLIN);
}

void tunnels_park(void)
{
    bool given_up = false;
    may_open = false;
    for (struct tunnel *t = tunnels, *next; t; t = next) {
        next = t->next;
        if (t->state == DIALING) {
            /* No image with a connection that is being made can be restored. It is made anew. */
            loop_close(&t->guest);
            given_up = true;
            continue;
        }
        if (t->state == OPEN || t->state == OPENING) {
            announce();
            tunnel_park(t);
            if (!tunnel_flush(t)) {
                tunnel_reset(t, ECONNRESET);
                continue;
            }
        }
        tunnel_settle(t);
    }
    if (given_up)
        usleep(SETTLE_US); /* for the network stack to be done with them */
}

bool tunnels_parked(void)
{
    if (herald.fd >= 0)
        return false;
    for (struct tunnel *t = tunnels; t; t = t->next)
        if (t->link.fd >= 0)
            return false;
    return true;
}

void tunnels_park_end(void)
{
    may_open = false;
    loop_close(&herald);
    for (struct tunnel *t = tunnels, *next; t; t = next) {
        next = t->next;
        if (t->link.fd >= 0)
            tunnel_reset(t, ECONNABORTED);
    }
}

void tunnels_attached(void)
{
    may_open = restless = true;
    for (struct tunnel *t = tunnels, *next; t; t = next) {
        next = t->next;
        if (t->state == PARKED)
            t->state = WAITING;
        if (t->state == DIALING && t->guest.fd < 0) {
            int error = begin_dial(t);
            if (error) {
                tunnel_reset(t, error);
                continue;
            }
            tunnel_settle(t);
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
        tunnel_reset(t, ECONNABORTED);
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
            tunnel_reset(t, ETIMEDOUT);
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
