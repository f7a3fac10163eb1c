/* The processes the node has asked for.
 *
 * Guarantee: a record, its exit code and its kept output stay until the node forgets them, within
 * the bounds below; a running process is never dropped. What a background child writes after its
 * parent ended is still kept, and no pipe is closed under it. */
#ifndef SOJOURN_PROCESS_H
#define SOJOURN_PROCESS_H

#include "connection.h"
#include "stream.h"

#include <sys/types.h>

#define ENDED_KEPT 256              /* ended records kept */
#define ENDED_OUTPUT (64ull << 20)  /* bytes of output kept for all ended ones together */
#define STDIN_QUEUE (256u << 10)    /* input taken ahead of the process, for each */
#define RUN_INLINE (768u << 10)     /* most output that comes with the answer of a run */
#define RUN_PATIENCE (250 * MS)     /* a lossless run that takes longer is answered while it runs */

struct parked;

struct process {
    struct process *next;
    uint64_t id;
    pid_t pid;
    bool running, pty, timed_out, settled, forgotten;
    int exit_code, signal; /* -1: not ended so */
    const char *reason;
    uint64_t started_ns, ended_ns; /* wall clock */
    uint64_t ended_at, last_data;  /* monotonic */
    uint64_t deadline;             /* monotonic, NEVER without a timeout */
    uint64_t chase_until;          /* a timed-out session is hunted down until then */
    struct stream out, err;
    struct source in; /* stdin pipe or a second descriptor of the terminal */
    struct bytes in_queue;
    bool in_broken, in_eof;
    uint64_t run_id, run_client; /* the run request that started it and still owns it */
    uint64_t run_until;          /* monotonic: a lossless run is answered then at the latest */
    bool run_early;              /* that was answered before all output was there */
    struct parked *parked;
    bool dirty;
    char *tag;
    char **argv; /* for display; one allocation */
    uint32_t argc;
};

void process_defaults(const char *user, const char *cwd, unsigned nproc_limit);

void process_start(struct request *request);
void process_run(struct request *request);
void process_wait(struct request *request);
void process_output(struct request *request);
void process_write(struct request *request);
void process_close_stdin(struct request *request);
void process_signal(struct request *request);
void process_resize(struct request *request);
void process_list(struct request *request);
void process_forget(struct request *request);
void process_look(struct request *request);

void process_cancel(uint64_t id);
void process_acknowledged(uint64_t id);
void process_parked_drop(void);
void process_new_client(void);

/* Collects every ended child; returns how many. */
unsigned process_reap(void);
uint64_t process_timers(uint64_t now); /* runs what is due, returns the next deadline */
void process_serve(void);              /* answers what can be answered now */
void process_hurry(void);              /* answers lossless runs as they stand */
bool process_any_running(void);

extern struct process *processes;
extern uint64_t processes_started, processes_ended;

/* For guard.c: kills every member of the session `sid`; returns how many were found. */
unsigned process_kill_session(pid_t sid);

/* -- shared by process.c, records.c and parked.c ------------------------------------------------ */
void process_dirty(struct process *process);
void process_release(struct process *process); /* frees the record of an ended one */
void process_put_state(const struct process *process, struct bytes *to);
void process_feed(struct process *process); /* moves queued input on */

#endif
