/* Starting a command; see spawn.h for the guarantee.
 *
 * The child shares the supervisor's memory until it has executed the program (as vfork does): under
 * gVisor copying the address space costs three times as much as the rest of the start, and the
 * child can report its error by writing it down. It therefore only makes system calls. */
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STACK_SIZE (64u << 10)

void spawn_file_limit(uint64_t bytes)
{
    /* For the supervisor's own writing too; what it starts inherits it. */
    struct rlimit limit = {bytes, bytes};
    setrlimit(RLIMIT_FSIZE, &limit);
}

static int fail(struct spawn *spawn, enum stage stage, int error)
{
    spawn->stage = stage;
    spawn->error = error;
    _exit(127);
}

static const char *search_path(char **envp)
{
    for (; *envp; envp++)
        if (!strncmp(*envp, "PATH=", 5))
            return *envp + 5;
    return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
}

static int execute(struct spawn *spawn)
{
    const char *name = spawn->argv[0];
    if (!*name)
        return ENOENT;
    if (strchr(name, '/')) {
        execve(name, spawn->argv, spawn->envp);
        return errno;
    }
    char candidate[PATH_MAX];
    size_t name_length = strlen(name);
    int error = ENOENT;
    for (const char *at = search_path(spawn->envp);; at++) {
        size_t length = strcspn(at, ":");
        if (length + name_length + 2 <= sizeof candidate) {
            memcpy(candidate, at, length);
            candidate[length] = '/';
            /* An empty element means the working directory. */
            memcpy(candidate + length + (length ? 1 : 0), name, name_length + 1);
            execve(candidate, spawn->argv, spawn->envp);
            if (errno == EACCES)
                error = EACCES; /* as in a shell: go on, but say so when nothing else is found */
            else if (errno != ENOENT && errno != ENOTDIR)
                return errno;
        }
        at += length;
        if (!*at)
            return error;
    }
}

/* The network's tables are the supervisor's own. For root they would come back at the exec by what
 * it may inherit, so they go from every set. */
static void drop_network_rights(void)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3];
    prctl(PR_CAPBSET_DROP, CAP_NET_ADMIN, 0, 0, 0);
    prctl(PR_CAPBSET_DROP, CAP_NET_RAW, 0, 0, 0);
    if (syscall(SYS_capget, &head, sets) < 0)
        return;
    uint32_t kept = ~(1u << CAP_NET_ADMIN | 1u << CAP_NET_RAW);
    sets[0].inheritable &= kept;
    sets[0].permitted &= kept;
    sets[0].effective &= kept;
    syscall(SYS_capset, &head, sets);
}

static int child(void *argument)
{
    struct spawn *spawn = argument;
    const struct user *user = spawn->user;
    drop_network_rights();
    for (int number = 1; number < NSIG; number++)
        if (number != SIGKILL && number != SIGSTOP) {
            struct sigaction defaults = {.sa_handler = SIG_DFL};
            sigaction(number, &defaults, NULL);
        }
    syscall(SYS_setsid);
    if (spawn->terminal && ioctl(spawn->stdin_fd, TIOCSCTTY, 0) < 0)
        fail(spawn, STAGE_PTY, errno);
    if (dup2(spawn->stdin_fd, 0) < 0 || dup2(spawn->stdout_fd, 1) < 0 ||
        dup2(spawn->stderr_fd, 2) < 0)
        fail(spawn, STAGE_SPAWN, errno);
    if (spawn->process_limit) {
        /* With either of these the limit would not hold. */
        prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0);
        prctl(PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0);
        struct rlimit limit = {spawn->process_limit, spawn->process_limit};
        setrlimit(RLIMIT_NPROC, &limit);
    }
    /* Plain system calls: the library's versions would touch the memory shared with the parent. */
    if (user->uid != 0 || user->gid != 0) {
        if (syscall(SYS_setgroups, user->group_count, user->groups) < 0 ||
            syscall(SYS_setresgid, user->gid, user->gid, user->gid) < 0 ||
            syscall(SYS_setresuid, user->uid, user->uid, user->uid) < 0)
            fail(spawn, STAGE_USER, errno);
    }
    if (spawn->cwd) {
        if (syscall(SYS_chdir, spawn->cwd) < 0)
            fail(spawn, STAGE_CWD, errno);
    } else if (syscall(SYS_chdir, user->home) < 0 && syscall(SYS_chdir, "/") < 0) {
        fail(spawn, STAGE_CWD, errno);
    }
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    return fail(spawn, STAGE_EXEC, execute(spawn));
}

int spawn_run(struct spawn *spawn)
{
    static unsigned char *stack;
    if (!stack) {
        stack = mmap(NULL, STACK_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED) {
            stack = NULL;
            spawn->stage = STAGE_SPAWN;
            spawn->error = errno;
            return -1;
        }
    }
    spawn->error = 0;
    int pid = clone(child, stack + STACK_SIZE, CLONE_VM | CLONE_VFORK | SIGCHLD, spawn);
    if (pid < 0) {
        spawn->stage = STAGE_SPAWN;
        spawn->error = errno;
        return -1;
    }
    /* The child's writes are visible here: the parent slept until it executed or ended. */
    if (*(volatile int *)&spawn->error)
        return -1; /* the ended child is reaped like any other */
    return pid;
}

int spawn_signals(void)
{
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigaction(SIGPIPE, &ignore, NULL);
    umask(022);
    sigset_t wanted;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGCHLD);
    return signalfd(-1, &wanted, SFD_NONBLOCK | SFD_CLOEXEC);
}
