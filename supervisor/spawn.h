/* Starting a command.
 *
 * Guarantee: either the program was executed, or the stage and errno that prevented it are known;
 * a command is never reported as started and then found missing by its exit code. */
#ifndef SOJOURN_SPAWN_H
#define SOJOURN_SPAWN_H

#include "users.h"
#include "wire.h"

struct spawn {
    char **argv, **envp;
    const char *cwd; /* NULL: home, else / */
    const struct user *user;
    int stdin_fd, stdout_fd, stderr_fd; /* of the child */
    bool terminal;                      /* stdin_fd becomes the controlling terminal */
    unsigned process_limit;             /* RLIMIT_NPROC, 0: leave */
    enum stage stage;                   /* on failure */
    int error;
};

/* The pid, or -1 with stage and error set. */
int spawn_run(struct spawn *spawn);
/* Puts the signals of the supervisor itself in order; children start with the defaults. */
void spawn_file_limit(uint64_t bytes); /* no file grows beyond */
int spawn_signals(void); /* returns the signal descriptor for SIGCHLD */

#endif
