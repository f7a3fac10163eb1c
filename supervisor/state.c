/* What the node asks about the sandbox as a whole; see state.h for the guarantee. */
#include "state.h"

#include "guard.h"
#include "jobs.h"
#include "network.h"
#include "process.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define TMPFS_KIND 0x01021994
#define TMPFS_ENTRIES 2000 /* more are not looked through */
#define UNLINKED_MOST 256
#define NO_DESCRIPTOR UINT32_MAX /* a map, a directory, a program */
#define DIRECTORY "/run/sojourn"

static unsigned char boot_id[16];

void state_open(void)
{
    if (getrandom(boot_id, sizeof boot_id, 0) != (ssize_t)sizeof boot_id)
        memset(boot_id, 0, sizeof boot_id);
}

static const char *shell(void)
{
    if (!access("/bin/bash", X_OK))
        return "/bin/bash";
    return access("/bin/sh", X_OK) ? "" : "/bin/sh";
}

void state_put_hello(struct bytes *to)
{
    put_u32(to, WIRE_MAGIC);
    put_u16(to, WIRE_VERSION);
    put_u32(to, MAX_BODY);
    put_blob(to, boot_id, sizeof boot_id);
    put_text(to, shell());
    put_u32(to, network_features());
}

void state_info(struct request *request)
{
    state_put_hello(answer_begin(request->id, request->op));
    answer_end();
}

/* -- activity -------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, const void *data, size_t length)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ at[i]) * 1099511628211ull; /* FNV-1a */
    return hash;
}

/* Adds up the hashes of the entries, so that their order does not matter. */
static bool look_through(const char *path, dev_t device, unsigned *left, uint64_t *sum,
                         unsigned depth)
{
    DIR *directory = opendir(path);
    if (!directory)
        return true; /* gone meanwhile */
    bool complete = depth < 64;
    for (struct dirent *entry; complete && (entry = readdir(directory));) {
        char child[PATH_MAX];
        struct stat status;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        if (!*left || snprintf(child, sizeof child, "%s/%s", path, entry->d_name) >=
                          (int)sizeof child) {
            complete = false;
            break;
        }
        --*left;
        if (!strcmp(child, DIRECTORY) || lstat(child, &status) < 0 || status.st_dev != device)
            continue;
        uint64_t facts[] = {status.st_ino,
                            status.st_mode,
                            (uint64_t)status.st_size,
                            (uint64_t)status.st_mtim.tv_sec,
                            (uint64_t)status.st_mtim.tv_nsec,
                            status.st_uid};
        *sum += mix(mix(14695981039346656037ull, child, strlen(child)), facts, sizeof facts);
        if (S_ISDIR(status.st_mode))
            complete = look_through(child, device, left, sum, depth + 1);
    }
    closedir(directory);
    return complete;
}

static bool memory_files(uint64_t *sum)
{
    unsigned left = TMPFS_ENTRIES;
    bool complete = true;
    FILE *mounts = fopen("/proc/mounts", "re");
    if (!mounts)
        return false;
    char *line = NULL;
    size_t size = 0;
    while (complete && getline(&line, &size, mounts) > 0) {
        char *rest = line;
        struct stat status;
        strsep(&rest, " ");
        char *point = strsep(&rest, " "), *kind = strsep(&rest, " ");
        if (!point || !kind || strcmp(kind, "tmpfs") || !strcmp(point, "/dev") ||
            stat(point, &status) < 0)
            continue;
        complete = look_through(point, status.st_dev, &left, sum, 0);
    }
    free(line);
    fclose(mounts);
    return complete;
}

void state_activity(struct request *request)
{
    uint64_t sum = 0;
    bool known = memory_files(&sum);
    unsigned alive = guard_look(&sum);
    struct bytes *to = answer_begin(request->id, request->op);
    put_u64(to, processes_started);
    put_u64(to, processes_ended);
    put_u32(to, alive);
    put_u8(to, known);
    put_u64(to, sum);
    answer_end();
}

/* -- open files without a name --------------------------------------------------------------- */

static bool deleted(const char *target, ssize_t length)
{
    static const char mark[] = " (deleted)";
    size_t size = sizeof mark - 1;
    return length > (ssize_t)size && !memcmp(target + length - size, mark, size);
}

static void read_command(const char *pid, char *command, size_t size)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/comm", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, command, size - 1);
    if (fd >= 0)
        close(fd);
    command[n > 0 ? n : 0] = 0;
    command[strcspn(command, "\n")] = 0;
}

static bool in_memory(const char *path, const char *target)
{
    struct statfs status;
    return !strncmp(target, "/memfd:", 7) ||
           (!statfs(path, &status) && status.f_type == TMPFS_KIND);
}

static void put_found(const char *pid, uint32_t fd, const char *target, struct bytes *to)
{
    char command[64];
    read_command(pid, command, sizeof command);
    put_u32(to, (uint32_t)strtoul(pid, NULL, 10));
    put_u32(to, fd);
    put_text(to, target);
    put_text(to, command);
}

/* One link of a process: a descriptor, its directory, its program. */
static bool look_at_link(const char *pid, const char *name, uint32_t fd, struct bytes *to)
{
    char path[300], target[PATH_MAX + 16];
    snprintf(path, sizeof path, "/proc/%s/%s", pid, name);
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n <= 0 || !deleted(target, n) || target[0] != '/')
        return false;
    target[n] = 0;
    if (in_memory(path, target))
        return false; /* part of memory, captured with it */
    target[n - (ssize_t)strlen(" (deleted)")] = 0;
    put_found(pid, fd, target, to);
    return true;
}

/* Maps keep a file whose descriptors are closed; reading them costs more than the rest. */
static uint32_t look_at_maps(const char *pid, struct bytes *to, uint32_t room)
{
    char path[64], last[PATH_MAX + 16] = "";
    uint32_t found = 0;
    snprintf(path, sizeof path, "/proc/%s/maps", pid);
    FILE *maps = fopen(path, "re");
    if (!maps)
        return 0;
    char *line = NULL;
    size_t size = 0;
    for (ssize_t n; found < room && (n = getline(&line, &size, maps)) > 0;) {
        char *target = strchr(line, '/');
        if (line[n - 1] == '\n')
            line[--n] = 0;
        if (!target || !deleted(target, line + n - target) || !strncmp(target, "/memfd:", 7) ||
            !strcmp(target, last))
            continue;
        snprintf(last, sizeof last, "%s", target);
        line[n - (ssize_t)strlen(" (deleted)")] = 0;
        put_found(pid, NO_DESCRIPTOR, target, to);
        found++;
    }
    free(line);
    fclose(maps);
    return found;
}

static uint32_t look_at(const char *pid, bool maps, struct bytes *to, uint32_t room)
{
    char path[300];
    uint32_t found = 0;
    snprintf(path, sizeof path, "/proc/%s/fd", pid);
    DIR *directory = opendir(path);
    if (!directory)
        return 0;
    for (struct dirent *entry; found < room && (entry = readdir(directory));) {
        snprintf(path, sizeof path, "fd/%s", entry->d_name);
        found += look_at_link(pid, path, (uint32_t)strtoul(entry->d_name, NULL, 10), to);
    }
    closedir(directory);
    if (found < room)
        found += look_at_link(pid, "cwd", NO_DESCRIPTOR, to);
    if (found < room)
        found += look_at_link(pid, "exe", NO_DESCRIPTOR, to);
    if (maps && found < room)
        found += look_at_maps(pid, to, room - found);
    return found;
}

void state_unlinked(struct request *request)
{
    bool maps = request->body.at < request->body.end && get_u8(&request->body);
    struct bytes *to = answer_begin(request->id, request->op);
    size_t count_at = to->length;
    uint32_t count = 0;
    put_u32(to, 0);
    DIR *directory = opendir("/proc");
    if (directory) {
        for (struct dirent *entry; count < UNLINKED_MOST && (entry = readdir(directory));)
            if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && strcmp(entry->d_name, "1"))
                count += look_at(entry->d_name, maps, to, UNLINKED_MOST - count);
        closedir(directory);
    }
    memcpy(to->data + count_at, &count, sizeof count);
    answer_end();
}

/* -- sync and refresh ------------------------------------------------------------------------ */

static int sync_job(const char *first, const char *second)
{
    (void)first;
    (void)second;
    sync();
    return 0;
}

void state_sync(struct request *request) { jobs_start(request, "/", NULL, sync_job); }

static int publish(const char *name, const char *text, size_t length)
{
    char path[128], temporary[136];
    snprintf(path, sizeof path, DIRECTORY "/%s", name);
    snprintf(temporary, sizeof temporary, "%s.new", path);
    /* Drivers make it to mount below it: open to all, or to root alone. */
    if (mkdir(DIRECTORY, 0755) < 0 && (errno != EEXIST || chmod(DIRECTORY, 0755) < 0))
        return errno;
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0)
        return errno;
    int error = write(fd, text, length) == (ssize_t)length ? 0 : errno ? errno : EIO;
    close(fd);
    if (!error && rename(temporary, path) < 0)
        error = errno;
    return error;
}

void state_refresh(struct request *request)
{
    uint32_t length, host_length;
    char *generation = get_text(&request->body, &length);
    char *host = get_text(&request->body, &host_length);
    if (request->body.bad)
        return;
    state_open();
    network_woken();
    int error = publish("generation", generation, length);
    if (error) {
        answer_error(request->id, request->op, error, STAGE_NONE, DIRECTORY "/generation");
        return;
    }
    /* A sandbox may deny this to its first process; the name is then the one it was started with,
     * and the answer says so. */
    char now[256] = "";
    bool named = !host_length || (!gethostname(now, sizeof now - 1) && !strcmp(now, host)) ||
                 !sethostname(host, host_length);
    put_u8(answer_begin(request->id, request->op), named);
    answer_end();
}
