/* Whether connections of the session leave it, and how; see network.h for the guarantee. */
#include "network.h"

#include "loop.h"
#include "names.h"
#include "nat.h"
#include "tunnels.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define TRANSPARENT_PORT 15001
#define NAMES_PORT 15053
#define PROXY_PORT 3128
#define BACKLOG 1024
#define AT_ONCE 64 /* connections and questions taken before others have their turn */

enum reach { REACH_OFF, REACH_PROXY, REACH_TRANSPARENT };

static void stream_ready(struct source *source, uint32_t events);
static void names_ready(struct source *source, uint32_t events);

static struct source transparent = {.fd = -1, .ready = stream_ready};
static struct source proxy = {.fd = -1, .ready = stream_ready};
static struct source names = {.fd = -1, .ready = names_ready};
static struct source usual_names = {.fd = -1, .ready = names_ready};
static bool own_stack, on;

/* -- what listens ---------------------------------------------------------------------------- */

static void stream_ready(struct source *source, uint32_t events)
{
    (void)events;
    for (int i = 0; i < AT_ONCE; i++) {
        int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            return;
        struct sockaddr_in server;
        if (source == &proxy)
            tunnels_accepted(fd, NULL);
        else if (nat_original(fd, &server))
            tunnels_accepted(fd, &server);
        else
            tunnels_refuse(fd); /* it was meant for this port itself */
    }
}

static void names_ready(struct source *source, uint32_t events)
{
    (void)events;
    for (int i = 0; i < AT_ONCE; i++) {
        unsigned char question[4096], answer[ANSWER_SIZE];
        struct sockaddr_in from;
        socklen_t size = sizeof from;
        ssize_t n = recvfrom(source->fd, question, sizeof question, MSG_DONTWAIT,
                             (struct sockaddr *)&from, &size);
        if (n < 0)
            return;
        size_t length = names_answer(question, (size_t)n, answer);
        /* Who does not take the answer asks again. */
        if (length && sendto(source->fd, answer, length, MSG_DONTWAIT | MSG_NOSIGNAL,
                             (struct sockaddr *)&from, size) < 0)
            errno = 0;
    }
}

static int listen_at(struct source *source, int kind, uint16_t port)
{
    if (source->fd >= 0)
        return 0;
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons(port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, kind | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), yes = 1;
    if (fd < 0)
        return errno;
    if (kind == SOCK_STREAM)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) < 0 ||
        (kind == SOCK_STREAM && listen(fd, BACKLOG) < 0)) {
        int error = errno;
        close(fd);
        return error;
    }
    source->fd = fd;
    loop_watch(source, EPOLLIN);
    return 0;
}

/* A program may have the port already: any other will do, as the tables say which it is. */
static int listen_somewhere(struct source *source, int kind, uint16_t port)
{
    int error = listen_at(source, kind, port);
    return error == EADDRINUSE ? listen_at(source, kind, 0) : error;
}

static uint16_t port_of(const struct source *source)
{
    struct sockaddr_in at = {0};
    socklen_t size = sizeof at;
    if (source->fd < 0 || getsockname(source->fd, (struct sockaddr *)&at, &size) < 0)
        return NAT_NOWHERE;
    return ntohs(at.sin_port);
}

static int set_tables(void) { return nat_set(port_of(&transparent), port_of(&names)); }

/* -- on and off ------------------------------------------------------------------------------ */

static void stop(void)
{
    loop_close(&transparent);
    loop_close(&proxy);
    loop_close(&names);
    loop_close(&usual_names);
}

static int switch_on(void)
{
    /* The usual ports are a convenience: who has them already does without. */
    int error = listen_at(&proxy, SOCK_STREAM, PROXY_PORT);
    if (!own_stack)
        return error;
    listen_at(&usual_names, SOCK_DGRAM, 53);
    error = listen_somewhere(&transparent, SOCK_STREAM, TRANSPARENT_PORT);
    if (!error)
        error = listen_somewhere(&names, SOCK_DGRAM, NAMES_PORT);
    return error ? error : set_tables();
}

void network_switch(struct request *request)
{
    bool wanted = get_u8(&request->body);
    if (request->body.bad)
        return;
    int error = 0;
    if (wanted && !on)
        error = switch_on();
    if (!wanted || error) {
        stop();
        if (own_stack)
            set_tables();
        tunnels_reset(false, false);
    }
    on = wanted && !error;
    if (error) {
        answer_error(request->id, request->op, error, STAGE_NONE, "the network of the session");
        return;
    }
    put_u8(answer_begin(request->id, request->op),
           !on ? REACH_OFF : own_stack ? REACH_TRANSPARENT : REACH_PROXY);
    answer_end();
}

uint32_t network_features(void)
{
    return FEATURE_TUNNELS | (own_stack ? FEATURE_TRANSPARENT : 0);
}

void network_woken(void)
{
    if (!own_stack || nat_present())
        return;
    tunnels_reset(true, true);
    set_tables();
}

void network_open(const char *socket_path, bool own)
{
    tunnels_open(socket_path);
    own_stack = own && !set_tables();
}
