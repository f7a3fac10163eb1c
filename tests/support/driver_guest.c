/* The first process of a sandbox in the driver tests: it connects out to the node's socket, obeys
 * one command per line and answers each with one line. Static, so that it runs in an empty tree. */
#define _GNU_SOURCE
#include "../../supervisor/enter.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;
static char *heap;
static size_t heap_size;
static volatile long *counter;
static volatile char *mapped;
static int node; /* the connection */

static void pause_ms(long ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

static int result(char *out, size_t size, long value) {
    return value < 0 ? snprintf(out, size, "error %s", strerror(errno))
                     : snprintf(out, size, "ok %ld", value);
}

/* A child that runs on by itself and answers nothing. */
static long child(void (*body)(const char *), const char *argument) {
    pid_t pid = fork();
    if (pid == 0) {
        close(node);
        body(argument);
        _exit(0);
    }
    return pid;
}

static void append(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    for (long n = 0;; n++) {
        char line[32];
        int length = snprintf(line, sizeof line, "%ld\n", n);
        if (write(fd, line, length) != length) _exit(1);
        pause_ms(2);
    }
}

static void eat(const char *unused) {
    (void)unused;
    for (;;) {
        char *more = malloc(8 << 20);
        if (more) memset(more, 1, 8 << 20);
    }
}

static void spin(const char *unused) {
    (void)unused;
    for (;;) ;
}

static void linger(const char *unused) {
    (void)unused;
    for (;;) pause();
}

static long as_user(long uid, const char *path) {
    pid_t pid = fork();
    if (pid == 0) {
        if (setgid(uid) < 0 || setuid(uid) < 0) _exit(errno);
        int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0644);
        _exit(fd < 0 ? errno : 0);
    }
    int status;
    waitpid(pid, &status, 0);
    errno = WEXITSTATUS(status);
    return errno ? -1 : 0;
}

static long run_deleted(const char *path) {
    char buffer[65536];
    ssize_t got;
    int from = open("/proc/self/exe", O_RDONLY), to = open(path, O_WRONLY | O_CREAT, 0755);
    if (from < 0 || to < 0) return -1;
    while ((got = read(from, buffer, sizeof buffer)) > 0)
        if (write(to, buffer, got) != got) return -1;
    close(from);
    close(to);
    pid_t pid = fork();
    if (pid == 0) {
        execl(path, path, "linger", (char *)NULL);
        _exit(1);
    }
    pause_ms(100);
    return unlink(path) < 0 ? -1 : pid;
}

static int obey(char *line, char *out, size_t size) {
    char word[32] = "", a[4096] = "", b[4096] = "";
    sscanf(line, "%31s %4095s %4095[^\n]", word, a, b);
#define IS(name) (strcmp(word, name) == 0)
    if (IS("ping")) return result(out, size, *counter);
    if (IS("env")) {
        int n = snprintf(out, size, "ok ");
        for (char **e = environ; *e; e++) n += snprintf(out + n, size - n, "%s\037", *e);
        return n;
    }
    if (IS("memory")) {
        struct sysinfo info;
        sysinfo(&info);
        return result(out, size, info.totalram * info.mem_unit);
    }
    if (IS("hostname")) {
        char name[256];
        gethostname(name, sizeof name);
        return snprintf(out, size, "ok %s", name);
    }
    if (IS("append")) return result(out, size, child(append, a));
    if (IS("eat")) return result(out, size, child(eat, a));
    if (IS("spin")) return result(out, size, child(spin, a));
    if (IS("fork")) {
        long made = 0;
        while (made < atol(a) && child(linger, "") > 0) made++;
        return result(out, size, made);
    }
    if (IS("as")) return result(out, size, as_user(atol(a), b));
    if (IS("exit")) _exit(atoi(a));
    if (IS("heap")) {
        heap_size = (size_t)atol(a) << 20;
        heap = malloc(heap_size);
        unsigned seed = 1;
        for (size_t i = 0; i + 4 <= heap_size; i += 4) {
            seed = seed * 1664525u + 1013904223u;
            memcpy(heap + i, &seed, 4);
        }
        return result(out, size, heap_size);
    }
    if (IS("sum")) {
        unsigned long sum = 0;
        for (size_t i = 0; i < heap_size; i += 512) sum = sum * 31 + (unsigned char)heap[i];
        return snprintf(out, size, "ok %lu", sum);
    }
    if (IS("write") || IS("keep") || IS("hold") || IS("mapw")) {
        int fd = open(a, O_RDWR | O_CREAT, 0644);
        if (fd < 0 || write(fd, b, strlen(b)) < 0) return result(out, size, -1);
        if (IS("write")) return result(out, size, close(fd));
        if (IS("hold") && unlink(a) < 0) return result(out, size, -1);
        if (IS("mapw")) {
            if (ftruncate(fd, 4096) < 0) return result(out, size, -1);
            mapped = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            mapped[100] = 'm';
        }
        return result(out, size, fd);
    }
    if (IS("mapr")) return snprintf(out, size, "ok %c", mapped[100]);
    if (IS("open")) return result(out, size, open(a, O_RDONLY));
    if (IS("close")) return result(out, size, close(atoi(a)));
    if (IS("pread")) {
        char data[2048];
        ssize_t got = pread(atoi(a), data, sizeof data - 1, 0);
        if (got < 0) return result(out, size, -1);
        data[got] = 0;
        return snprintf(out, size, "ok %s", data);
    }
    if (IS("read")) {
        char data[2048];
        int fd = open(a, O_RDONLY);
        ssize_t got = fd < 0 ? -1 : read(fd, data, sizeof data - 1);
        if (got < 0) return result(out, size, -1);
        close(fd);
        data[got] = 0;
        return snprintf(out, size, "ok %s", data);
    }
    if (IS("unlink")) return result(out, size, unlink(a));
    if (IS("rename")) return result(out, size, rename(a, b));
    if (IS("mkdir")) return result(out, size, mkdir(a, 0755));
    if (IS("mknod")) return result(out, size, mknod(a, S_IFCHR | 0666, makedev(1, 3)));
    if (IS("mount")) return result(out, size, unshare(CLONE_NEWNS));
    if (IS("fifo")) {
        if (mkfifo(a, 0644) < 0) return result(out, size, -1);
        return result(out, size, open(a, O_RDWR));
    }
    if (IS("bind")) {
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        struct sockaddr_un name = {.sun_family = AF_UNIX};
        strncpy(name.sun_path, a, sizeof name.sun_path - 1);
        if (bind(fd, (void *)&name, sizeof name) < 0 || listen(fd, 5) < 0) return result(out, size, -1);
        return result(out, size, fd);
    }
    if (IS("tmpfile")) return result(out, size, open(a, O_TMPFILE | O_RDWR, 0644));
    if (IS("memfd")) {
        int fd = memfd_create("probe", 0);
        return result(out, size, fd < 0 ? -1 : write(fd, "memfd", 5));
    }
    if (IS("pty")) {
        int fd = posix_openpt(O_RDWR | O_NOCTTY);
        if (fd < 0 || grantpt(fd) < 0 || unlockpt(fd) < 0) return result(out, size, -1);
        return result(out, size, open(ptsname(fd), O_RDWR | O_NOCTTY));
    }
    if (IS("inotify")) {
        int fd = inotify_init();
        return result(out, size, fd < 0 ? -1 : inotify_add_watch(fd, a, IN_ALL_EVENTS));
    }
    if (IS("flock")) {
        int fd = open(a, O_RDWR | O_CREAT, 0644);
        return result(out, size, fd < 0 ? -1 : flock(fd, LOCK_EX));
    }
    if (IS("gonecwd")) {
        if (mkdir(a, 0755) < 0 || chdir(a) < 0) return result(out, size, -1);
        return result(out, size, rmdir(a));
    }
    if (IS("cwd")) return result(out, size, chdir(a));
    if (IS("othername")) {
        int fd = open(a, O_RDWR | O_CREAT, 0644);
        if (fd < 0 || link(a, b) < 0) return result(out, size, -1);
        return result(out, size, unlink(a));
    }
    if (IS("oddname")) return result(out, size, open("/odd (deleted)", O_RDWR | O_CREAT, 0644));
    if (IS("stop")) {
        long pid = child(linger, "");
        pause_ms(50);
        return result(out, size, kill(pid, SIGSTOP));
    }
    if (IS("trap")) {
        long pid = child(linger, "");
        pause_ms(50);
        if (ptrace(PTRACE_ATTACH, pid, 0, 0) < 0) return result(out, size, -1);
        return result(out, size, waitpid(pid, NULL, 0));
    }
    if (IS("deleted")) return result(out, size, run_deleted(a));
    if (IS("stdout")) return result(out, size, write(1, a, strlen(a)));
    return snprintf(out, size, "error unknown command %s", word);
}

/* One connection, until it ends. */
static void serve(void) {
    char line[8192], out[65536];
    size_t used = 0;
    int n = snprintf(out, sizeof out, "hello %ld\n", *counter);
    if (write(node, out, n) != n) return;
    for (;;) {
        ssize_t got = read(node, line + used, sizeof line - 1 - used);
        if (got <= 0) return;
        used += got;
        line[used] = 0;
        char *end = strchr(line, '\n');
        if (!end) continue;
        *end = 0;
        used = 0;
        if (strcmp(line, "detach") == 0) return;
        n = obey(line, out, sizeof out - 1);
        out[n++] = '\n';
        if (write(node, out, n) != n) return;
    }
}

int main(int argc, char **argv) {
    int entered = enter(argc, argv); /* as a supervisor's program, it also starts its runtime */
    if (entered >= 0) return entered;
    if (argc > 1 && strcmp(argv[1], "linger") == 0) linger("");
    signal(SIGPIPE, SIG_IGN);
    counter = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (fork() == 0)
        for (;;) {
            ++*counter;
            pause_ms(1);
        }
    for (;;) {
        while (waitpid(-1, NULL, WNOHANG) > 0) ;
        node = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "/run/sojourn/node/node.sock"};
        if (connect(node, (void *)&name, sizeof name) == 0) serve();
        close(node);
        pause_ms(2);
    }
}
