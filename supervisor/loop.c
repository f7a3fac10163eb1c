/* The event loop; see loop.h for the guarantee. */
#include "loop.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

static int epoll_fd = -1;

#define BATCH 64
static struct epoll_event batch[BATCH];
static int batch_size, batch_at;

void loop_open(void)
{
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0)
        abort();
}

void loop_watch(struct source *source, uint32_t events)
{
    if (source->watched && source->events == events)
        return;
    struct epoll_event event = {.events = events, .data.ptr = source};
    epoll_ctl(epoll_fd, source->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, source->fd, &event);
    source->watched = true;
    source->events = events;
}

void loop_unwatch(struct source *source)
{
    if (!source->watched)
        return;
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, source->fd, NULL);
    source->watched = false;
    /* An event of this turn may still name a source that its owner is about to free. */
    for (int i = batch_at + 1; i < batch_size; i++)
        if (batch[i].data.ptr == source)
            batch[i].data.ptr = NULL;
}

void loop_close(struct source *source)
{
    if (source->fd < 0)
        return;
    loop_unwatch(source);
    close(source->fd);
    source->fd = -1;
}

void loop_turn(uint64_t deadline)
{
    int timeout = -1;
    if (deadline != NEVER) {
        uint64_t now = now_ns();
        uint64_t left = deadline > now ? (deadline - now + MS - 1) / MS : 0;
        timeout = left > 3600000 ? 3600000 : (int)left;
    }
    batch_size = epoll_wait(epoll_fd, batch, BATCH, timeout);
    for (batch_at = 0; batch_at < batch_size; batch_at++) {
        struct source *source = batch[batch_at].data.ptr;
        if (source)
            source->ready(source, batch[batch_at].events);
    }
    batch_size = batch_at = 0;
}

static uint64_t read_clock(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

uint64_t now_ns(void) { return read_clock(CLOCK_MONOTONIC); }
uint64_t wall_clock(void) { return read_clock(CLOCK_REALTIME); }
