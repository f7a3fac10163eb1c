/* Removing and moving whole trees; see trees.h for the guarantee. */
#include "trees.h"

#include "bytes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#define DEPTH_MOST 256 /* each level holds a descriptor */

static bool dots(const char *name) { return !strcmp(name, ".") || !strcmp(name, ".."); }

static int open_directory(int parent, const char *name)
{
    return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* -- remove ---------------------------------------------------------------------------------- */

struct removal {
    int top;             /* the tree's own root: very deep directories are moved up to it */
    unsigned long moved; /* how many were */
};

static int empty(struct removal *removal, int directory, unsigned depth);

static int remove_entry(struct removal *removal, int parent, const char *name, unsigned depth)
{
    if (!unlinkat(parent, name, 0) || errno == ENOENT)
        return 0;
    if (errno != EISDIR && errno != EPERM && errno != EBUSY)
        return errno;
    if (!unlinkat(parent, name, AT_REMOVEDIR) || errno == ENOENT)
        return 0;
    if (errno != ENOTEMPTY && errno != EEXIST)
        return errno;
    if (depth >= DEPTH_MOST) {
        char other[64];
        snprintf(other, sizeof other, ".sojourn-remove-%d-%lu", (int)getpid(), removal->moved++);
        return renameat(parent, name, removal->top, other) < 0 ? errno : 0;
    }
    int directory = open_directory(parent, name);
    if (directory < 0)
        return errno;
    int error = empty(removal, directory, depth + 1);
    if (!error && unlinkat(parent, name, AT_REMOVEDIR) < 0 && errno != ENOENT)
        error = errno;
    return error;
}

/* Takes the descriptor over. */
static int empty(struct removal *removal, int directory, unsigned depth)
{
    DIR *entries = fdopendir(directory);
    if (!entries) {
        int error = errno;
        close(directory);
        return error;
    }
    int error = 0;
    bool again = true;
    /* Removing while reading may skip entries, and deep ones come up meanwhile. */
    while (again && !error) {
        again = false;
        rewinddir(entries);
        for (struct dirent *entry; !error && (entry = readdir(entries));)
            if (!dots(entry->d_name)) {
                again = true;
                error = remove_entry(removal, dirfd(entries), entry->d_name, depth);
            }
    }
    closedir(entries);
    return error;
}

int trees_remove_job(const char *path, const char *unused)
{
    (void)unused;
    int top = open_directory(AT_FDCWD, path);
    if (top < 0)
        return errno;
    struct removal removal = {.top = top};
    int error = empty(&removal, dup(top), 0);
    close(top);
    if (!error && rmdir(path) < 0 && errno != ENOENT)
        error = errno;
    return error;
}

/* -- copy, for a move between file systems ------------------------------------------------------ */

static void copy_attributes(int from, int to)
{
    char names[4096], value[65536];
    ssize_t size = flistxattr(from, names, sizeof names);
    for (ssize_t at = 0; at < size; at += (ssize_t)strlen(names + at) + 1) {
        ssize_t n = fgetxattr(from, names + at, value, sizeof value);
        /* As cp -a does: an attribute the other file system cannot hold is left out. */
        if (n >= 0 && fsetxattr(to, names + at, value, (size_t)n, 0) < 0)
            continue;
    }
}

static int finish(int fd, const struct stat *status)
{
    struct timespec times[2] = {status->st_atim, status->st_mtim};
    if (fchown(fd, status->st_uid, status->st_gid) < 0 || fchmod(fd, status->st_mode & 07777) < 0 ||
        futimens(fd, times) < 0)
        return errno;
    return 0;
}

static int copy_bytes(int from, int to)
{
    static char buffer[262144];
    for (;;) {
        ssize_t n = read(from, buffer, sizeof buffer);
        if (n == 0)
            return 0;
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno;
        for (ssize_t at = 0; at < n;) {
            ssize_t m = write(to, buffer + at, (size_t)(n - at));
            if (m < 0 && errno != EINTR)
                return errno;
            if (m > 0)
                at += m;
        }
    }
}

static int copy(int from_parent, const char *from_name, int to_parent, const char *to_name,
                unsigned depth);

static int copy_directory(int from, int to_parent, const char *to_name, const struct stat *status,
                          unsigned depth)
{
    if (depth > DEPTH_MOST * 8) {
        close(from);
        return ENAMETOOLONG;
    }
    int to = -1, error = 0;
    if (mkdirat(to_parent, to_name, 0700) < 0 || (to = open_directory(to_parent, to_name)) < 0) {
        error = errno;
        close(from);
        return error;
    }
    DIR *entries = fdopendir(from);
    if (!entries) {
        error = errno;
        close(from);
    } else {
        for (struct dirent *entry; !error && (entry = readdir(entries));)
            if (!dots(entry->d_name))
                error = copy(dirfd(entries), entry->d_name, to, entry->d_name, depth + 1);
        if (!error) {
            copy_attributes(dirfd(entries), to);
            error = finish(to, status);
        }
        closedir(entries);
    }
    close(to);
    return error;
}

static int copy_file(int from_parent, const char *from_name, int to_parent, const char *to_name,
                     const struct stat *status)
{
    int from = openat(from_parent, from_name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (from < 0)
        return errno;
    int to = openat(to_parent, to_name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    int error = to < 0 ? errno : copy_bytes(from, to);
    if (!error) {
        copy_attributes(from, to);
        error = finish(to, status);
    }
    close(from);
    if (to >= 0)
        close(to);
    return error;
}

static int copy(int from_parent, const char *from_name, int to_parent, const char *to_name,
                unsigned depth)
{
    struct stat status;
    if (fstatat(from_parent, from_name, &status, AT_SYMLINK_NOFOLLOW) < 0)
        return errno;
    if (S_ISDIR(status.st_mode)) {
        int from = open_directory(from_parent, from_name);
        return from < 0 ? errno : copy_directory(from, to_parent, to_name, &status, depth);
    }
    if (S_ISREG(status.st_mode))
        return copy_file(from_parent, from_name, to_parent, to_name, &status);
    if (S_ISLNK(status.st_mode)) {
        char target[PATH_MAX];
        ssize_t n = readlinkat(from_parent, from_name, target, sizeof target - 1);
        if (n < 0)
            return errno;
        target[n] = 0;
        if (symlinkat(target, to_parent, to_name) < 0)
            return errno;
    } else if (mknodat(to_parent, to_name, status.st_mode, status.st_rdev) < 0 ||
               fchmodat(to_parent, to_name, status.st_mode & 07777, 0) < 0) {
        return errno;
    }
    struct timespec times[2] = {status.st_atim, status.st_mtim};
    if (fchownat(to_parent, to_name, status.st_uid, status.st_gid, AT_SYMLINK_NOFOLLOW) < 0 ||
        utimensat(to_parent, to_name, times, AT_SYMLINK_NOFOLLOW) < 0)
        return errno;
    return 0;
}

static int discard(const char *path)
{
    struct stat status;
    if (lstat(path, &status) < 0)
        return errno == ENOENT ? 0 : errno;
    if (S_ISDIR(status.st_mode))
        return trees_remove_job(path, NULL);
    return unlink(path) < 0 && errno != ENOENT ? errno : 0;
}

/* The copy is complete under another name before it takes the target's place; the source goes last. */
int trees_move_job(const char *source, const char *target)
{
    char *beside = NULL;
    size_t length = strlen(target);
    while (length > 1 && target[length - 1] == '/')
        length--;
    size_t parent = length;
    while (parent && target[parent - 1] != '/')
        parent--;
    if (asprintf(&beside, "%.*s.sojourn-move-%d", (int)parent, target, (int)getpid()) < 0)
        return ENOMEM;
    int error = discard(beside);
    if (!error)
        error = copy(AT_FDCWD, source, AT_FDCWD, beside, 0);
    if (!error && rename(beside, target) < 0)
        error = errno;
    if (error) {
        int left = discard(beside);
        (void)left; /* the first error is the one to tell */
    } else {
        error = discard(source);
    }
    free(beside);
    return error;
}
