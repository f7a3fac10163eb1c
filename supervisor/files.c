/* Files of the session; see files.h for the guarantee. */
#include "files.h"

#include "jobs.h"
#include "trees.h"
#include "users.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static char default_user[256] = "0";

void files_defaults(const char *user) { snprintf(default_user, sizeof default_user, "%s", user); }

int files_owner(const char *user, uid_t *uid, gid_t *gid)
{
    struct user found;
    const char *name = *user ? user : default_user;
    if (!strcmp(name, "0")) {
        *uid = 0;
        *gid = 0;
        return 0;
    }
    if (user_find(name, &found))
        return ENOENT;
    *uid = found.uid;
    *gid = found.gid;
    return 0;
}

static char kind(mode_t mode)
{
    return S_ISREG(mode)    ? 'f'
           : S_ISDIR(mode)  ? 'd'
           : S_ISLNK(mode)  ? 'l'
           : S_ISFIFO(mode) ? 'p'
           : S_ISSOCK(mode) ? 's'
           : S_ISCHR(mode)  ? 'c'
                            : 'b';
}

void files_put_stat(struct bytes *to, const struct stat *status, const char *target)
{
    put_u8(to, (uint8_t)kind(status->st_mode));
    put_u16(to, status->st_mode & 07777);
    put_u32(to, status->st_uid);
    put_u32(to, status->st_gid);
    put_u64(to, (uint64_t)status->st_size);
    put_u64(to, (uint64_t)status->st_mtim.tv_sec * 1000000000ull +
                    (uint64_t)status->st_mtim.tv_nsec);
    put_u64(to, status->st_ino);
    put_u32(to, (uint32_t)status->st_nlink);
    put_u64(to, S_ISCHR(status->st_mode) || S_ISBLK(status->st_mode) ? status->st_rdev : 0);
    put_text(to, target);
}

bool files_answer_stat(const struct request *request, const char *path, bool follow)
{
    struct stat status;
    char target[PATH_MAX] = "";
    if (fstatat(AT_FDCWD, path, &status, follow ? 0 : AT_SYMLINK_NOFOLLOW) < 0) {
        answer_error(request->id, request->op, errno, STAGE_NONE, path);
        return false;
    }
    if (S_ISLNK(status.st_mode)) {
        ssize_t n = readlink(path, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
    }
    files_put_stat(answer_begin(request->id, request->op), &status, target);
    answer_end();
    return true;
}

/* Reads the path every file request begins with; answers and returns NULL when it is invalid. */
static char *path_of(struct request *request)
{
    int error = 0;
    char *path = get_path(&request->body, &error);
    if (request->body.bad)
        return NULL;
    if (error) {
        answer_error(request->id, request->op, error, STAGE_NONE, path);
        return NULL;
    }
    return path;
}

void files_stat(struct request *request)
{
    char *path = path_of(request);
    if (!path)
        return;
    bool follow = get_u8(&request->body);
    if (!request->body.bad)
        files_answer_stat(request, path, follow);
}

/* The inode, once known, is asked for again, so that a reader never gets pieces of two files. */
void files_read(struct request *request)
{
    char *path = path_of(request);
    if (!path)
        return;
    uint64_t offset = get_u64(&request->body), inode = get_u64(&request->body);
    uint32_t most = get_u32(&request->body);
    if (request->body.bad)
        return;
    struct stat status;
    int error = 0;
    /* Opening a FIFO or a device must neither block nor have effects. */
    int fd = -1;
    if (stat(path, &status) < 0)
        error = errno;
    else if (S_ISDIR(status.st_mode))
        error = EISDIR;
    else if (!S_ISREG(status.st_mode))
        error = EINVAL;
    else if ((fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)) < 0 ||
             fstat(fd, &status) < 0)
        error = errno;
    else if (!S_ISREG(status.st_mode) || (inode && inode != status.st_ino))
        error = ESTALE;
    if (!error) {
        if (most > PIECE)
            most = PIECE;
        struct bytes *to = answer_begin(request->id, request->op);
        put_u64(to, status.st_ino);
        put_u64(to, (uint64_t)status.st_size);
        size_t length_at = to->length;
        put_u32(to, 0);
        bytes_reserve(to, most);
        ssize_t n;
        do
            n = pread(fd, to->data + to->length, most, (off_t)offset);
        while (n < 0 && errno == EINTR);
        if (n < 0) {
            error = errno;
        } else {
            uint32_t length = (uint32_t)n;
            memcpy(to->data + length_at, &length, sizeof length);
            to->length += (size_t)n;
            answer_end();
        }
    }
    if (fd >= 0)
        close(fd);
    if (error)
        answer_error(request->id, request->op, error, STAGE_NONE, path);
}

int files_parents(const char *path, uid_t uid, gid_t gid)
{
    char *copy = strdup(path);
    int error = 0;
    struct stat status;
    for (char *at = copy; !error && (at = strchr(at + 1, '/'));) {
        *at = 0;
        if (!mkdir(copy, 0755)) {
            if ((uid || gid) && lchown(copy, uid, gid) < 0)
                error = errno;
        } else if (errno != EEXIST) {
            error = errno;
        } else if (!stat(copy, &status) && !S_ISDIR(status.st_mode)) {
            error = ENOTDIR;
        }
        *at = '/';
    }
    free(copy);
    return error;
}

void files_mkdir(struct request *request)
{
    char *path = path_of(request);
    if (!path)
        return;
    mode_t mode = get_u32(&request->body) & 07777;
    bool parents = get_u8(&request->body);
    if (request->body.bad)
        return;
    uid_t uid;
    gid_t gid;
    struct stat status;
    for (size_t n = strlen(path); n > 1 && path[n - 1] == '/';)
        path[--n] = 0;
    int error = files_owner("", &uid, &gid);
    if (!error && parents)
        error = files_parents(path, uid, gid);
    if (!error) {
        if (mkdir(path, mode) < 0) {
            error = errno;
            if (error == EEXIST && parents && !stat(path, &status) && S_ISDIR(status.st_mode))
                error = 0;
        } else if (chmod(path, mode) < 0 || ((uid || gid) && lchown(path, uid, gid) < 0)) {
            error = errno;
        }
    }
    answer_result(request->id, request->op, error, path);
}

void files_remove(struct request *request)
{
    char *path = path_of(request);
    if (!path)
        return;
    bool recursive = get_u8(&request->body);
    if (request->body.bad)
        return;
    struct stat status;
    int error = 0;
    for (size_t n = strlen(path); n > 1 && path[n - 1] == '/';)
        path[--n] = 0;
    if (!strcmp(path, "/"))
        error = EBUSY;
    else if (lstat(path, &status) < 0)
        error = errno;
    else if (unlinkat(AT_FDCWD, path, S_ISDIR(status.st_mode) ? AT_REMOVEDIR : 0) < 0)
        error = errno;
    if (recursive && (error == ENOTEMPTY || error == EEXIST)) {
        /* A large tree takes long; a process of its own does it while the rest goes on. */
        jobs_start(request, path, NULL, trees_remove_job);
        return;
    }
    answer_result(request->id, request->op, error, path);
}

void files_move(struct request *request)
{
    char *source = path_of(request);
    char *target = source ? path_of(request) : NULL;
    if (!target)
        return;
    int error = rename(source, target) < 0 ? errno : 0;
    if (error == EXDEV) {
        jobs_start(request, source, target, trees_move_job);
        return;
    }
    answer_result(request->id, request->op, error, source);
}

void files_chmod(struct request *request)
{
    char *path = path_of(request);
    if (!path)
        return;
    mode_t mode = get_u32(&request->body) & 07777;
    if (request->body.bad)
        return;
    answer_result(request->id, request->op, chmod(path, mode) < 0 ? errno : 0, path);
}

void files_chown(struct request *request)
{
    char *path = path_of(request);
    if (!path)
        return;
    uid_t uid = get_u32(&request->body);
    gid_t gid = get_u32(&request->body);
    bool follow = get_u8(&request->body);
    if (request->body.bad)
        return;
    int failed = fchownat(AT_FDCWD, path, uid, gid, follow ? 0 : AT_SYMLINK_NOFOLLOW);
    answer_result(request->id, request->op, failed < 0 ? errno : 0, path);
}

void files_utime(struct request *request)
{
    char *path = path_of(request);
    if (!path)
        return;
    int64_t ns = (int64_t)get_u64(&request->body);
    if (request->body.bad)
        return;
    struct timespec mtime = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    if (mtime.tv_nsec < 0) {
        mtime.tv_nsec += 1000000000;
        mtime.tv_sec--;
    }
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, mtime};
    int failed = utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
    answer_result(request->id, request->op, failed < 0 ? errno : 0, path);
}

static void give_to_default(const char *path)
{
    uid_t uid;
    gid_t gid;
    if (!files_owner("", &uid, &gid) && (uid || gid)) {
        int unchanged = lchown(path, uid, gid); /* root's then, which its user sees */
        (void)unchanged;
    }
}

void files_symlink(struct request *request)
{
    uint32_t length;
    char *target = get_text(&request->body, &length);
    char *path = path_of(request);
    if (!path)
        return;
    int error = length >= PATH_MAX ? ENAMETOOLONG : symlink(target, path) < 0 ? errno : 0;
    if (!error)
        give_to_default(path);
    answer_result(request->id, request->op, error, path);
}

void files_link(struct request *request)
{
    char *existing = path_of(request);
    char *path = existing ? path_of(request) : NULL;
    if (!path)
        return;
    answer_result(request->id, request->op, link(existing, path) < 0 ? errno : 0, path);
}

void files_mknod(struct request *request)
{
    char *path = path_of(request);
    if (!path)
        return;
    char type = (char)get_u8(&request->body);
    mode_t mode = get_u32(&request->body) & 07777;
    uint64_t rdev = get_u64(&request->body);
    if (request->body.bad)
        return;
    mode_t format = type == 'p'   ? S_IFIFO
                    : type == 's' ? S_IFSOCK
                    : type == 'c' ? S_IFCHR
                    : type == 'b' ? S_IFBLK
                    : type == 'f' ? S_IFREG
                                  : 0;
    int error = format ? 0 : EINVAL;
    if (!error && (mknod(path, format | mode, (dev_t)rdev) < 0 || chmod(path, mode) < 0))
        error = errno;
    if (!error)
        give_to_default(path);
    answer_result(request->id, request->op, error, path);
}
