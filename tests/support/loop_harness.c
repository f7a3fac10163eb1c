/* The supervisor's event loop over a kernel that reports what was removed, as one does that was
 * restored: each look at a set reports what was ever removed from it. */
#include "../../supervisor/loop.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#define MOST 64

int __real_epoll_create1(int flags);
int __real_epoll_ctl(int set, int what, int fd, struct epoll_event *event);
int __real_epoll_wait(int set, struct epoll_event *events, int most, int timeout);

static struct {
    epoll_data_t named[MOST]; /* by descriptor: what its last registration said */
    struct epoll_event removed[MOST];
    int count;
} sets[MOST];
static int stale_told;

int __wrap_epoll_create1(int flags)
{
    int set = __real_epoll_create1(flags);
    sets[set].count = 0;
    return set;
}

int __wrap_epoll_ctl(int set, int what, int fd, struct epoll_event *event)
{
    if (what == EPOLL_CTL_DEL)
        sets[set].removed[sets[set].count++] =
            (struct epoll_event){EPOLLIN | EPOLLHUP, sets[set].named[fd]};
    else
        sets[set].named[fd] = event->data;
    return __real_epoll_ctl(set, what, fd, event);
}

int __wrap_epoll_wait(int set, struct epoll_event *events, int most, int timeout)
{
    int n = 0;
    for (; n < sets[set].count; n++)
        events[n] = sets[set].removed[n];
    stale_told += n;
    int more = __real_epoll_wait(set, events + n, most - n, n ? 0 : timeout);
    return more > 0 ? n + more : n;
}

struct reader {
    struct source source;
    int writer, told;
    struct reader *ends; /* freed by the next event */
};

static struct reader *left; /* who ended the other */

static void end(struct reader *reader)
{
    loop_close(&reader->source);
    close(reader->writer);
    free(reader);
}

static void ready(struct source *source, uint32_t events)
{
    struct reader *reader = (struct reader *)source;
    char byte;
    (void)events;
    if (read(source->fd, &byte, 1) != 1)
        abort(); /* told of without cause */
    reader->told++;
    if (reader->ends) {
        end(reader->ends);
        left = reader;
    }
}

static struct reader *begin(void)
{
    int pair[2];
    struct reader *reader = calloc(1, sizeof *reader);
    if (!reader || pipe(pair) < 0)
        abort();
    reader->source = (struct source){.fd = pair[0], .ready = ready};
    reader->writer = pair[1];
    loop_watch(&reader->source, EPOLLIN);
    return reader;
}

static void poke(const struct reader *reader)
{
    if (write(reader->writer, "x", 1) != 1)
        abort();
}

static void turn(void) { loop_turn(now_ns()); }

static void expect(int truth, const char *what)
{
    if (!truth) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

int main(void)
{
    loop_open();
    struct reader *kept = begin();

    /* Removed and freed: reported once more, and then no more, as the set is another. */
    end(begin());
    poke(kept);
    turn();
    expect(stale_told == 1, "no stale event was told");
    expect(kept->told == 1, "an event beside a stale one was lost");
    turn();
    turn();
    expect(stale_told == 1, "a stale event is told again and again");
    poke(kept);
    turn();
    expect(kept->told == 2, "what goes on is not watched in the new set");

    /* What takes a removed one's descriptor and memory is not told of it. */
    end(begin());
    struct reader *newer = begin();
    turn();
    expect(!newer->told && stale_told == 2, "a stale event was taken for who came after it");

    /* One that is watched for something else meanwhile, and one that is not watched at times. */
    loop_watch(&newer->source, EPOLLIN | EPOLLRDHUP);
    loop_unwatch(&newer->source);
    loop_watch(&newer->source, EPOLLIN);
    turn();
    expect(!newer->told && stale_told == 3, "an earlier registration was taken for the present");
    poke(newer);
    turn();
    expect(newer->told == 1, "watched again, it is not told");

    /* Both are ready; whichever comes first ends the other. */
    struct reader *one = begin(), *two = begin();
    one->ends = two;
    two->ends = one;
    poke(one);
    poke(two);
    turn();
    expect(left == one || left == two, "neither of two was told");
    end(left);

    /* Made anew before a freeze, nothing is left that could come back. */
    end(begin());
    int before = stale_told;
    loop_renew();
    poke(kept);
    turn();
    expect(stale_told == before && kept->told == 3, "removed ones outlive a new set");

    /* Many, so that places are taken again and their table grows. */
    struct reader *many[40];
    for (int round = 0; round < 100; round++) {
        for (int i = 0; i < 15; i++)
            many[i] = begin();
        for (int i = 0; i < 15; i += 2)
            end(many[i]);
        for (int i = 1; i < 15; i += 2)
            poke(many[i]);
        turn();
        for (int i = 1; i < 15; i += 2) {
            expect(many[i]->told == 1, "one of many was not told");
            end(many[i]);
        }
        loop_renew();
    }
    end(newer);
    end(kept);
    puts("well");
    return 0;
}
