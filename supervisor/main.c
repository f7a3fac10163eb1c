/* sojourn-supervisor: PID 1 of a sandbox.
 *
 * Guarantee: it starts commands, keeps their output and exit codes, reaps every child, and serves
 * one node at a time over a connection that it opens itself and that can go away at any moment
 * without loss. It needs nothing of the template it runs in. */
#include "connection.h"
#include "enter.h"
#include "files.h"
#include "guard.h"
#include "listing.h"
#include "loop.h"
#include "network.h"
#include "process.h"
#include "spawn.h"
#include "state.h"
#include "tunnels.h"
#include "watch.h"

#include <getopt.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

static void child_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct signalfd_siginfo info;
    while (read(source->fd, &info, sizeof info) == (ssize_t)sizeof info)
        ;
    guard_reaped(process_reap());
}

static int usage(int status)
{
    fputs("usage: sojourn-supervisor [--socket PATH] [--user USER] [--cwd DIRECTORY]\n"
          "                          [--max-processes N] [--max-file BYTES] [--derive-home]\n"
          "                          [--own-network]\n"
          "       sojourn-supervisor --enter|--enter-plain FILE [--read-only PATH]... COMMAND...\n"
          "       sojourn-supervisor --version\n",
          status ? stderr : stdout);
    return status;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"socket", required_argument, NULL, 's'}, {"user", required_argument, NULL, 'u'},
        {"cwd", required_argument, NULL, 'c'},    {"max-processes", required_argument, NULL, 'm'},
        {"max-file", required_argument, NULL, 'f'}, {"derive-home", no_argument, NULL, 'd'},
        {"own-network", no_argument, NULL, 'n'},
        {"version", no_argument, NULL, 'v'},      {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0}};
    int entered = enter(argc, argv);
    if (entered >= 0)
        return entered;
    bool own_network = false;
    const char *socket = "/run/sojourn/node/node.sock", *user = "0", *cwd = "";
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (option) {
        case 's':
            socket = optarg;
            break;
        case 'u':
            user = optarg;
            break;
        case 'c':
            cwd = optarg;
            break;
        case 'm':
            guard_limit((unsigned)strtoul(optarg, NULL, 10));
            break;
        case 'f':
            spawn_file_limit(strtoull(optarg, NULL, 10));
            break;
        case 'd':
            /* The runtime gave us root's; every command gets that of its user. */
            unsetenv("HOME");
            break;
        case 'n':
            own_network = true;
            break;
        case 'v':
            printf("sojourn-supervisor wire %d\n", WIRE_VERSION);
            return 0;
        case 'h':
            return usage(0);
        default:
            return usage(2);
        }
    }
    if (optind < argc)
        return usage(2);

    /* Large pieces go back to the kernel when they are freed. */
    mallopt(M_MMAP_THRESHOLD, 128 * 1024);
    mallopt(M_TRIM_THRESHOLD, 256 * 1024);
    struct source children = {.fd = spawn_signals(), .ready = child_ready};
    if (children.fd < 0) {
        perror("sojourn-supervisor: signalfd");
        return 1;
    }
    if (chdir("/") < 0)
        perror("sojourn-supervisor: /");
    loop_open();
    state_open();
    process_defaults(user, cwd, guard_kernel_limit());
    files_defaults(user);
    loop_watch(&children, EPOLLIN);
    connection_open(socket);
    network_open(socket, own_network);
    for (;;) {
        uint64_t now = now_ns();
        uint64_t deadline = process_timers(now), other = guard_timers(now);
        if (other < deadline)
            deadline = other;
        process_serve();
        watch_serve();
        bool more = listing_serve();
        connection_serve(now);
        other = tunnels_timers(now);
        if (other < deadline)
            deadline = other;
        other = connection_deadline();
        if (other < deadline)
            deadline = other;
        loop_turn(more ? 0 : deadline);
    }
}
