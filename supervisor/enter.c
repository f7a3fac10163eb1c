/* The surroundings in which the host starts the runtime of a sandbox; see enter.h.
 *
 * The runtime copies interfaces and addresses of the namespace it is started in into the network
 * stack of the sandbox. With these two, every IPv4 address is an address of the sandbox's own
 * loopback: a packet to any of them stays inside. Memory of before there were tables that refuse
 * what is not redirected gets a plain loopback, or its own programs would answer for the world. */
#include "enter.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

#define LOOPBACK 1 /* the index of `lo` in every new namespace */
#define FAILED 125

static int add_address(int fd, const char *text)
{
    struct {
        struct nlmsghdr head;
        struct ifaddrmsg body;
        struct {
            struct rtattr head;
            in_addr_t address;
        } attributes[2];
    } request = {
        .head = {.nlmsg_len = sizeof request,
                 .nlmsg_type = RTM_NEWADDR,
                 .nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE},
        .body = {.ifa_family = AF_INET, .ifa_prefixlen = 1, .ifa_index = LOOPBACK},
        .attributes = {{{8, IFA_ADDRESS}, inet_addr(text)}, {{8, IFA_LOCAL}, inet_addr(text)}},
    };
    struct {
        struct nlmsghdr head;
        struct nlmsgerr body;
        char rest[512];
    } answer = {.body.error = -EIO};
    if (send(fd, &request, sizeof request, 0) < 0 || recv(fd, &answer, sizeof answer, 0) < 0)
        return errno;
    return -answer.body.error;
}

static int fail(const char *what)
{
    perror(what);
    return FAILED;
}

/* Without this, root inside gets at the host's files: the runtime lets it mount what it was given
 * read-only as writable, in a namespace of its own, and changes then go to the host as they are. */
static int hold_read_only(const char *path)
{
    if (mount(path, path, NULL, MS_BIND, NULL) < 0)
        return -1;
    return mount("none", path, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL);
}

int enter(int argc, char **argv)
{
    if (argc < 4 || (strcmp(argv[1], "--enter") && strcmp(argv[1], "--enter-plain")))
        return -1;
    bool everywhere = !strcmp(argv[1], "--enter");
    char *meminfo = argv[2], **command = argv + 3;
    if (unshare(CLONE_NEWNS | CLONE_NEWNET) < 0)
        return fail("namespaces");
    /* What the host unmounts later must not be held here. */
    if (mount("none", "/", NULL, MS_REC | MS_SLAVE, NULL) < 0)
        return fail("mounts");
    for (; command[0] && command[1] && !strcmp(command[0], "--read-only"); command += 2)
        if (hold_read_only(command[1]) < 0)
            return fail(command[1]);
    if (!command[0]) {
        errno = EINVAL;
        return fail("command");
    }
    /* The runtime reads the memory of the machine from this file; a failure costs the right
     * number. Some kernels show files in the other directory that the runtime cannot read. */
    if (mount(meminfo, "/proc/meminfo", NULL, MS_BIND, NULL) < 0)
        perror(meminfo);
    if (mount("none", "/proc/sys/net", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
        perror("/proc/sys/net");
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    struct ifreq up = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || control < 0 || ioctl(control, SIOCSIFFLAGS, &up) < 0)
        return fail("loopback");
    if (everywhere &&
        ((errno = add_address(fd, "64.0.0.1")) || (errno = add_address(fd, "198.19.255.254"))))
        return fail("addresses");
    execvp(command[0], command);
    return fail(command[0]);
}
