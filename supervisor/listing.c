/* Directory listings of any size; see listing.h for the guarantee. */
#include "listing.h"

#include "files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LISTING_PIECE 65536

struct listing {
    struct listing *next;
    uint64_t id;
    DIR *directory;
};

static struct listing *listings;

static void release(struct listing **at)
{
    struct listing *one = *at;
    *at = one->next;
    closedir(one->directory);
    free(one);
}

/* One frame; true when it was the last. */
static bool send_piece(struct listing *listing)
{
    struct bytes *to = answer_begin(listing->id, OP_LIST);
    size_t count_at = to->length;
    uint32_t count = 0;
    bool last = false;
    put_u32(to, 0);
    while (to->length < LISTING_PIECE) {
        struct dirent *entry = readdir(listing->directory);
        if (!entry) {
            last = true;
            break;
        }
        struct stat status;
        char target[PATH_MAX] = "";
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        if (fstatat(dirfd(listing->directory), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) < 0)
            continue; /* removed meanwhile */
        if (S_ISLNK(status.st_mode)) {
            ssize_t n =
                readlinkat(dirfd(listing->directory), entry->d_name, target, sizeof target - 1);
            target[n > 0 ? n : 0] = 0;
        }
        put_text(to, entry->d_name);
        files_put_stat(to, &status, target);
        count++;
    }
    memcpy(to->data + count_at, &count, sizeof count);
    if (last)
        answer_end();
    else
        answer_end_more();
    return last;
}

void listing_start(struct request *request)
{
    int error = 0;
    char *path = get_path(&request->body, &error);
    if (request->body.bad)
        return;
    int fd = error ? -1 : open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory) {
        if (!error)
            error = errno;
        if (fd >= 0)
            close(fd);
        answer_error(request->id, request->op, error, STAGE_NONE, path);
        return;
    }
    struct listing *one = checked_calloc(1, sizeof *one);
    one->id = request->id;
    one->directory = directory;
    one->next = listings;
    listings = one;
    /* The common case is over at once. */
    if (send_piece(one))
        release(&listings);
}

bool listing_serve(void)
{
    for (struct listing **at = &listings; *at && !connection_full();) {
        if (send_piece(*at))
            release(at);
        else
            at = &(*at)->next;
    }
    return listings && !connection_full();
}

void listing_cancel(uint64_t id)
{
    for (struct listing **at = &listings; *at; at = &(*at)->next)
        if ((*at)->id == id) {
            release(at);
            return;
        }
}

void listing_drop(void)
{
    while (listings)
        release(&listings);
}
