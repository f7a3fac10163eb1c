/* The surroundings in which the host starts the runtime of a sandbox. This part runs on the host.
 *
 * Guarantee: the command runs in a network namespace of its own with nothing but a loopback that
 * has every IPv4 address (or only its own), and in a mount namespace of its own, in which the kernel
 * refuses changes of the paths that are named; or it does not run. */
#ifndef SOJOURN_ENTER_H
#define SOJOURN_ENTER_H

#include <stdbool.h>

/* For `--enter MEMINFO [--read-only PATH]... COMMAND...` and `--enter-plain` with the same: runs the
 * command with MEMINFO in place of /proc/meminfo. Returns an exit status, or -1: it was neither. */
int enter(int argc, char **argv);

#endif
