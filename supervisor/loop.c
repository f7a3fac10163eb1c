/* The event loop; see loop.h for the guarantee. */
#include "loop.h"

#include "bytes.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

static int epoll_fd = -1;

#define BATCH 64

/* What an event names: a place here and how often that was taken, never memory. The kernel of a
 * sandbox may report a registration that was removed before its memory was put away, once it was
 * restored, and goes on reporting it for as long as the set lives. */
struct place {
    struct source *source; /* NULL: free */
    uint32_t taken, next_free;
};

#define NO_PLACE UINT32_MAX

static struct place *places;
static uint32_t place_count, first_free = NO_PLACE;
static bool removed; /* since the set was made */

void loop_open(void)
{
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0)
        abort();
}

static void take_place(struct source *source)
{
    if (first_free == NO_PLACE) {
        uint32_t count = place_count ? place_count * 2 : 16;
        places = checked_realloc(places, count * sizeof *places);
        for (uint32_t i = place_count; i < count; i++)
            places[i] = (struct place){.next_free = i + 1 < count ? i + 1 : NO_PLACE};
        first_free = place_count;
        place_count = count;
    }
    source->place = first_free;
    first_free = places[source->place].next_free;
    places[source->place].source = source;
    places[source->place].taken++;
}

static void free_place(struct source *source)
{
    places[source->place].source = NULL;
    places[source->place].next_free = first_free;
    first_free = source->place;
}

static uint64_t name_of(const struct source *source)
{
    return (uint64_t)places[source->place].taken << 32 | source->place;
}

static struct source *named(uint64_t name)
{
    uint32_t place = (uint32_t)name;
    return place < place_count && places[place].taken == name >> 32 ? places[place].source : NULL;
}

static int control(int set, int what, const struct source *source, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u64 = name_of(source)};
    return epoll_ctl(set, what, source->fd, &event);
}

void loop_watch(struct source *source, uint32_t events)
{
    if (source->watched && source->events == events)
        return;
    if (!source->watched)
        take_place(source);
    control(epoll_fd, source->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, source, events);
    source->watched = true;
    source->events = events;
}

void loop_unwatch(struct source *source)
{
    if (!source->watched)
        return;
    control(epoll_fd, EPOLL_CTL_DEL, source, 0);
    free_place(source);
    source->watched = false;
    removed = true;
}

void loop_renew(void)
{
    if (!removed)
        return;
    int set = epoll_create1(EPOLL_CLOEXEC);
    if (set < 0)
        return; /* the old one serves until there is room */
    for (uint32_t i = 0; i < place_count; i++)
        if (places[i].source &&
            control(set, EPOLL_CTL_ADD, places[i].source, places[i].source->events) < 0) {
            close(set); /* as above: nobody may be left out of it */
            return;
        }
    close(epoll_fd);
    epoll_fd = set;
    removed = false;
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
    struct epoll_event batch[BATCH];
    int size = epoll_wait(epoll_fd, batch, BATCH, timeout);
    bool stale = false;
    for (int i = 0; i < size; i++)
        stale |= !named(batch[i].data.u64);
    for (int i = 0; i < size; i++) {
        /* Those before it in the batch may have ended it. */
        struct source *source = named(batch[i].data.u64);
        if (source)
            source->ready(source, batch[i].events);
    }
    if (stale) {
        removed = true;
        loop_renew();
    }
}

static uint64_t read_clock(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

uint64_t now_ns(void) { return read_clock(CLOCK_MONOTONIC); }
uint64_t wall_clock(void) { return read_clock(CLOCK_REALTIME); }
