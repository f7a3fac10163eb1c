/* Writing files; see uploads.h for the guarantee. */
#include "uploads.h"

#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LINKS_MOST 40
#define UPLOADS_MOST 256

enum write_flag { WRITE_HAS_MODE = 1, WRITE_APPEND = 2, WRITE_PARENTS = 4, WRITE_HAS_USER = 8 };

struct upload {
    struct upload *next;
    uint64_t handle;
    bool append, created; /* append: the file itself; created: by this upload */
    char *target, *temporary;
    mode_t mode;
    uid_t uid;
    gid_t gid;
    uint64_t received;
    off_t before; /* append: the size at the beginning */
};

static struct upload *uploads;
static uint64_t next_handle = 1;
static unsigned upload_count;

static void release(struct upload *upload)
{
    free(upload->target);
    free(upload->temporary);
    free(upload);
}

/* Follows the links at the end of `path`; those above are the kernel's business. */
static int resolve(const char *path, char **resolved)
{
    char *at = strdup(path), link[PATH_MAX];
    for (int i = 0; i < LINKS_MOST; i++) {
        ssize_t n = readlink(at, link, sizeof link - 1);
        if (n < 0) {
            *resolved = at;
            return 0;
        }
        link[n] = 0;
        char *next = NULL;
        if (link[0] == '/')
            next = strdup(link);
        else if (asprintf(&next, "%.*s%s", (int)(strrchr(at, '/') - at + 1), at, link) < 0)
            next = NULL;
        free(at);
        if (!next)
            return ENOMEM;
        if (strlen(next) >= PATH_MAX) {
            free(next);
            return ENAMETOOLONG;
        }
        at = next;
    }
    free(at);
    return ELOOP;
}

static int name_temporary(struct upload *upload)
{
    size_t directory = (size_t)(strrchr(upload->target, '/') - upload->target + 1);
    if (asprintf(&upload->temporary, "%.*s.sojourn-write-%llx-%llx", (int)directory, upload->target,
                 (unsigned long long)next_handle, (unsigned long long)upload->handle ^
                                                      (unsigned long long)getpid() << 32) < 0)
        return ENOMEM;
    int fd = open(upload->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno;
    close(fd);
    return 0;
}

/* Reads the common start of a write and prepares it; 0 or an errno. */
static int prepare(struct reader *body, char **path, struct upload **made)
{
    int error = 0;
    *made = NULL;
    *path = get_path(body, &error);
    uint8_t flags = get_u8(body);
    mode_t mode = get_u32(body) & 07777;
    char *user = get_text(body, NULL);
    if (body->bad || error)
        return error;
    struct upload *upload = checked_calloc(1, sizeof *upload);
    struct stat status;
    upload->handle = next_handle++;
    upload->append = flags & WRITE_APPEND;
    size_t length = strlen(*path);
    if ((*path)[length - 1] == '/')
        error = EISDIR;
    else
        error = resolve(*path, &upload->target);
    if (error)
        goto failed;
    if ((error = files_owner(flags & WRITE_HAS_USER ? user : "", &upload->uid, &upload->gid)))
        goto failed;
    upload->mode = flags & WRITE_HAS_MODE ? mode : 0644;
    if (!lstat(upload->target, &status)) {
        if (S_ISDIR(status.st_mode))
            error = EISDIR;
        else if (!S_ISREG(status.st_mode))
            error = EINVAL;
        if (!(flags & WRITE_HAS_MODE))
            upload->mode = status.st_mode & 07777;
        if (!(flags & WRITE_HAS_USER)) {
            upload->uid = status.st_uid;
            upload->gid = status.st_gid;
        }
    } else {
        upload->created = true;
        if (errno != ENOENT)
            error = errno;
        else if (flags & WRITE_PARENTS)
            error = files_parents(upload->target, upload->uid, upload->gid);
    }
    if (error)
        goto failed;
    if (upload->append) {
        int fd = open(upload->target, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0600);
        if (fd < 0)
            error = errno;
        else
            close(fd);
        if (!error && !stat(upload->target, &status))
            upload->before = status.st_size;
    } else {
        error = name_temporary(upload);
    }
    if (error)
        goto failed;
    *made = upload;
    return 0;
failed:
    release(upload);
    return error;
}

static int write_all(struct upload *upload, int fd, const unsigned char *data, size_t length)
{
    while (length) {
        ssize_t n = write(fd, data, length);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? errno : EIO;
        data += n;
        length -= (size_t)n;
        upload->received += (uint64_t)n;
    }
    return 0;
}

static int add(struct upload *upload, const unsigned char *data, size_t length)
{
    if (!length)
        return 0;
    int fd = open(upload->append ? upload->target : upload->temporary,
                  O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return errno;
    int error = write_all(upload, fd, data, length);
    if (close(fd) < 0 && !error)
        error = errno;
    return error;
}

static int publish(struct upload *upload)
{
    const char *path = upload->append ? upload->target : upload->temporary;
    if (!upload->append || upload->created) {
        struct stat status;
        if (lstat(path, &status) < 0)
            return errno;
        if ((status.st_uid != upload->uid || status.st_gid != upload->gid) &&
            lchown(path, upload->uid, upload->gid) < 0)
            return errno;
        /* After chown, which takes set-id bits away. */
        if (chmod(path, upload->mode) < 0)
            return errno;
    }
    if (!upload->append && rename(upload->temporary, upload->target) < 0)
        return errno;
    return 0;
}

static void discard(struct upload *upload)
{
    struct stat status;
    if (!upload->append) {
        if (upload->temporary)
            unlink(upload->temporary);
    } else if (upload->created && !upload->before) {
        unlink(upload->target);
    } else if (!stat(upload->target, &status) &&
               status.st_size == upload->before + (off_t)upload->received) {
        /* Only what came from here is taken back, not what others have appended since. */
        int kept = truncate(upload->target, upload->before);
        (void)kept;
    }
}

void uploads_whole(struct request *request)
{
    char *path;
    struct upload *upload;
    int error = prepare(&request->body, &path, &upload);
    uint32_t length;
    const unsigned char *data = get_blob(&request->body, &length);
    if (request->body.bad) {
        if (upload) {
            discard(upload);
            release(upload);
        }
        return;
    }
    if (!error) {
        error = add(upload, data, length);
        if (!error)
            error = publish(upload);
        if (error)
            discard(upload);
    }
    if (error)
        answer_error(request->id, request->op, error, STAGE_NONE, path);
    else
        files_answer_stat(request, upload->target, false);
    if (upload)
        release(upload);
}

void uploads_begin(struct request *request)
{
    char *path;
    struct upload *upload;
    int error = prepare(&request->body, &path, &upload);
    if (request->body.bad)
        return;
    if (!error && upload_count >= UPLOADS_MOST) {
        discard(upload);
        release(upload);
        error = EAGAIN;
    }
    if (error) {
        answer_error(request->id, request->op, error, STAGE_NONE, path);
        return;
    }
    upload->next = uploads;
    uploads = upload;
    upload_count++;
    put_u64(answer_begin(request->id, request->op), upload->handle);
    answer_end();
}

static struct upload **find(struct request *request)
{
    uint64_t handle = get_u64(&request->body);
    if (request->body.bad)
        return NULL;
    for (struct upload **at = &uploads; *at; at = &(*at)->next)
        if ((*at)->handle == handle)
            return at;
    answer_error(request->id, request->op, ESTALE, STAGE_NONE, "unknown upload");
    return NULL;
}

static void take_out(struct upload **at)
{
    struct upload *upload = *at;
    *at = upload->next;
    upload_count--;
    release(upload);
}

void uploads_data(struct request *request)
{
    struct upload **at = find(request);
    if (!at)
        return;
    uint64_t offset = get_u64(&request->body);
    uint32_t length;
    const unsigned char *data = get_blob(&request->body, &length);
    if (request->body.bad)
        return;
    int error = offset != (*at)->received ? ESPIPE : add(*at, data, length);
    if (error) {
        answer_error(request->id, request->op, error, STAGE_NONE, (*at)->target);
        discard(*at);
        take_out(at);
        return;
    }
    answer_result(request->id, request->op, 0, NULL);
}

void uploads_end(struct request *request)
{
    struct upload **at = find(request);
    if (!at)
        return;
    int error = publish(*at);
    if (error) {
        answer_error(request->id, request->op, error, STAGE_NONE, (*at)->target);
        discard(*at);
    } else {
        files_answer_stat(request, (*at)->target, false);
    }
    take_out(at);
}

void uploads_abort(struct request *request)
{
    struct upload **at = find(request);
    if (!at)
        return;
    discard(*at);
    take_out(at);
    answer_result(request->id, request->op, 0, NULL);
}

void uploads_abort_all(void)
{
    while (uploads) {
        discard(uploads);
        take_out(&uploads);
    }
}
