/* The guard against fork storms; see guard.h for the guarantee. */
#include "guard.h"

#include "bytes.h"
#include "loop.h"
#include "process.h"

#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/klog.h>
#include <unistd.h>

#define PERIOD SECOND
#define PERIOD_HIGH (100 * MS) /* above half of the limit */
#define PERIOD_BURST (50 * MS)
#define BURST 32
#define PASSES 64

struct member {
    pid_t pid, sid;
};

static unsigned limit;
static uint64_t next_look = NEVER, last_look;

void guard_limit(unsigned most) { limit = most; }

/* gVisor says who it is in its kernel log. On Linux the users' processes are counted over all the
 * host, and root's not at all; there the driver's control group is the bound. */
static bool gvisor(void)
{
    char log[8192];
    int n = klogctl(3, log, sizeof log - 1); /* SYSLOG_ACTION_READ_ALL */
    log[n > 0 ? n : 0] = 0;
    return strstr(log, "gVisor");
}

unsigned guard_kernel_limit(void) { return limit && gvisor() ? limit + limit / 8 + 16 : 0; }

static unsigned members(struct member **list, uint64_t *sum)
{
    unsigned count = 0, capacity = 0;
    DIR *directory = opendir("/proc");
    if (list)
        *list = NULL;
    if (!directory)
        return 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
        if (pid <= 1)
            continue;
        if (list) {
            if (count == capacity) {
                capacity = capacity ? capacity * 2 : 256;
                *list = checked_realloc(*list, capacity * sizeof **list);
            }
            (*list)[count] = (struct member){pid, getsid(pid)};
        }
        if (sum) {
            uint64_t hash = (uint64_t)pid * 0x9e3779b97f4a7c15ull;
            *sum += hash ^ hash >> 29; /* added up: their order does not matter */
        }
        count++;
    }
    closedir(directory);
    return count;
}

unsigned guard_count(void) { return members(NULL, NULL); }

unsigned guard_look(uint64_t *sum) { return members(NULL, sum); }

static int by_session(const void *a, const void *b)
{
    const struct member *x = a, *y = b;
    return x->sid < y->sid ? -1 : x->sid > y->sid;
}

static struct process *record_of(pid_t sid)
{
    for (struct process *p = processes; p; p = p->next)
        if (p->pid == sid)
            return p; /* the newest with this number */
    return NULL;
}

static void end_session(pid_t sid)
{
    struct process *p = record_of(sid);
    if (p) {
        p->reason = "process limit exceeded";
        process_dirty(p);
    }
    /* Children forked during a pass are found by the next one. */
    for (int pass = 0; pass < PASSES && process_kill_session(sid); pass++)
        guard_reaped(process_reap());
}

/* The largest session; or, when each process is in one of its own, those nobody asked for. */
static void cut_down(void)
{
    struct member *list;
    unsigned count = members(&list, NULL), best = 0;
    pid_t worst = 0;
    qsort(list, count, sizeof *list, by_session);
    for (unsigned i = 0, run; i < count; i += run) {
        for (run = 1; i + run < count && list[i + run].sid == list[i].sid; run++)
            ;
        if (run > best && list[i].sid > 1) {
            best = run;
            worst = list[i].sid;
        }
    }
    if (best >= count / 4 && worst) {
        end_session(worst);
    } else {
        for (unsigned i = 0; i < count; i++) {
            struct process *p = record_of(list[i].sid);
            if (!p || !p->running)
                kill(list[i].pid, SIGKILL);
        }
        process_reap();
        /* The starter may be a command that is still at it: the newest is the likeliest. */
        if (guard_count() > limit)
            for (struct process *p = processes; p; p = p->next)
                if (p->running) {
                    end_session(p->pid);
                    break;
                }
    }
    free(list);
}

void guard_started(void)
{
    uint64_t soon = now_ns() + PERIOD;
    if (limit && soon < next_look)
        next_look = soon;
}

void guard_reaped(unsigned count)
{
    if (limit && count >= BURST && last_look + PERIOD_BURST < next_look)
        next_look = last_look + PERIOD_BURST;
}

uint64_t guard_timers(uint64_t now)
{
    if (now < next_look)
        return next_look;
    last_look = now;
    unsigned count = guard_count();
    for (int i = 0; count > limit && i < 8; i++) {
        cut_down();
        process_reap();
        count = guard_count();
    }
    if (count > limit / 2)
        next_look = now + PERIOD_HIGH;
    else if (count)
        next_look = now + PERIOD;
    else
        next_look = NEVER; /* nothing lives: nothing can fork */
    return next_look;
}
