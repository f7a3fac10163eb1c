/* Watching directories for changes; see watch.h for the guarantee. */
#include "watch.h"

#include "loop.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#define WATCHES_MOST 32
#define DIRECTORIES_MOST 8192
#define EVENTS_MOST 4096
#define ANSWER_EVENTS 512
#define ANSWER_BYTES (256u << 10)
#define MASK                                                                                       \
    (IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_DELETE_SELF | \
     IN_MOVE_SELF | IN_ONLYDIR)

struct event {
    char kind;
    bool directory;
    char *path;
};

struct watch {
    struct source source;
    struct watch *next;
    uint64_t handle;
    bool recursive, overflown, top_gone;
    char **paths; /* by watch descriptor */
    int path_count, directories;
    struct event events[EVENTS_MOST]; /* a ring; the event numbered n is at n % EVENTS_MOST */
    uint64_t first, after;
    uint64_t parked_id, parked_from;
};

static struct watch *watches;
static uint64_t next_handle = 1;
static unsigned watch_count;

static void push(struct watch *watch, char kind, const char *path, bool directory)
{
    /* The last place is for the word that the rest was lost; not even an overflow goes beyond. */
    if (watch->after - watch->first >= EVENTS_MOST - 1) {
        if (watch->overflown)
            return;
        watch->overflown = true;
        kind = 'o';
        path = "";
    }
    struct event *event = &watch->events[watch->after++ % EVENTS_MOST];
    *event = (struct event){kind, directory, strdup(path)};
}

static void add_directory(struct watch *watch, const char *path, bool announce, unsigned depth);

static void add_children(struct watch *watch, const char *path, bool announce, unsigned depth)
{
    DIR *directory = opendir(path);
    if (!directory)
        return;
    for (struct dirent *entry; (entry = readdir(directory));) {
        char child[PATH_MAX];
        struct stat status;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") ||
            snprintf(child, sizeof child, "%s/%s", strcmp(path, "/") ? path : "",
                     entry->d_name) >= (int)sizeof child ||
            lstat(child, &status) < 0)
            continue;
        /* Made before the watch on its directory was in place. */
        if (announce)
            push(watch, 'c', child, S_ISDIR(status.st_mode));
        if (S_ISDIR(status.st_mode))
            add_directory(watch, child, announce, depth + 1);
    }
    closedir(directory);
}

static void add_directory(struct watch *watch, const char *path, bool announce, unsigned depth)
{
    if (depth > 128 || watch->directories >= DIRECTORIES_MOST) {
        push(watch, 'o', path, true); /* what happens below is not seen */
        return;
    }
    int wd = inotify_add_watch(watch->source.fd, path, MASK | (depth ? IN_DONT_FOLLOW : 0));
    if (wd < 0)
        return;
    if (wd >= watch->path_count) {
        int count = wd * 2 + 16;
        watch->paths = checked_realloc(watch->paths, (size_t)count * sizeof(char *));
        memset(watch->paths + watch->path_count, 0,
               (size_t)(count - watch->path_count) * sizeof(char *));
        watch->path_count = count;
    }
    if (!watch->paths[wd])
        watch->directories++;
    free(watch->paths[wd]);
    watch->paths[wd] = strdup(path);
    if (watch->recursive)
        add_children(watch, path, announce, depth);
}

static void take(struct watch *watch, const struct inotify_event *event)
{
    if (event->mask & IN_Q_OVERFLOW) {
        push(watch, 'o', "", false);
        return;
    }
    if (event->wd < 0 || event->wd >= watch->path_count || !watch->paths[event->wd])
        return;
    const char *directory = watch->paths[event->wd];
    if (event->mask & IN_IGNORED) {
        free(watch->paths[event->wd]);
        watch->paths[event->wd] = NULL;
        watch->directories--;
        return;
    }
    char path[PATH_MAX + NAME_MAX + 2];
    snprintf(path, sizeof path, "%s%s%s", strcmp(directory, "/") || !event->len ? directory : "",
             event->len ? "/" : "", event->len ? event->name : "");
    bool is_directory = event->mask & IN_ISDIR;
    char kind = event->mask & IN_CREATE       ? 'c'
                : event->mask & IN_MODIFY     ? 'm'
                : event->mask & IN_DELETE     ? 'd'
                : event->mask & IN_MOVED_FROM ? 'f'
                : event->mask & IN_MOVED_TO   ? 't'
                : event->mask & IN_ATTRIB     ? 'a'
                                              : 0;
    if (event->mask & (IN_DELETE_SELF | IN_MOVE_SELF)) {
        if (event->wd == 1) {
            push(watch, 'd', path, true);
            watch->top_gone = true;
        } else if (event->mask & IN_MOVE_SELF) {
            /* Its new place, if it is below, was announced as such and gets a watch there. */
            inotify_rm_watch(watch->source.fd, event->wd);
        }
        return;
    }
    if (!kind)
        return;
    push(watch, kind, path, is_directory);
    if (watch->recursive && is_directory && (kind == 'c' || kind == 't'))
        add_directory(watch, path, kind == 'c', 1);
}

static void inotify_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct watch *watch = (struct watch *)source;
    char buffer[16384] __attribute__((aligned(8)));
    ssize_t n;
    while ((n = read(source->fd, buffer, sizeof buffer)) > 0)
        for (ssize_t at = 0; at < n;) {
            const struct inotify_event *event = (const struct inotify_event *)(buffer + at);
            take(watch, event);
            at += (ssize_t)(sizeof *event + event->len);
        }
}

static void confirm(struct watch *watch, uint64_t from)
{
    while (watch->first < from && watch->first < watch->after)
        free(watch->events[watch->first++ % EVENTS_MOST].path);
    if (watch->after - watch->first < EVENTS_MOST / 2)
        watch->overflown = false;
}

static void release(struct watch **at)
{
    struct watch *watch = *at;
    *at = watch->next;
    loop_close(&watch->source);
    confirm(watch, watch->after);
    for (int i = 0; i < watch->path_count; i++)
        free(watch->paths[i]);
    free(watch->paths);
    free(watch);
    watch_count--;
}

void watch_start(struct request *request)
{
    int error = 0;
    char *path = get_path(&request->body, &error);
    bool recursive = get_u8(&request->body);
    if (request->body.bad)
        return;
    struct stat status;
    int fd = -1;
    if (!error && stat(path, &status) < 0)
        error = errno;
    else if (!error && !S_ISDIR(status.st_mode))
        error = ENOTDIR;
    else if (!error && watch_count >= WATCHES_MOST)
        error = EMFILE;
    else if (!error && (fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) < 0)
        error = errno;
    if (error) {
        answer_error(request->id, request->op, error, STAGE_NONE, path);
        return;
    }
    for (size_t n = strlen(path); n > 1 && path[n - 1] == '/';)
        path[--n] = 0;
    struct watch *watch = checked_calloc(1, sizeof *watch);
    watch->source = (struct source){.fd = fd, .ready = inotify_ready};
    watch->recursive = recursive;
    watch->handle = next_handle++;
    watch->next = watches;
    watches = watch;
    watch_count++;
    loop_watch(&watch->source, EPOLLIN);
    add_directory(watch, path, false, 0);
    put_u64(answer_begin(request->id, request->op), watch->handle);
    answer_end();
}

static struct watch **find(struct request *request)
{
    uint64_t handle = get_u64(&request->body);
    if (request->body.bad)
        return NULL;
    for (struct watch **at = &watches; *at; at = &(*at)->next)
        if ((*at)->handle == handle)
            return at;
    answer_error(request->id, request->op, ESTALE, STAGE_NONE, "unknown watch");
    return NULL;
}

void watch_read(struct request *request)
{
    struct watch **at = find(request);
    if (!at)
        return;
    uint64_t from = get_u64(&request->body);
    if (request->body.bad)
        return;
    confirm(*at, from);
    (*at)->parked_id = request->id;
    (*at)->parked_from = from;
}

void watch_end(struct request *request)
{
    struct watch **at = find(request);
    if (!at)
        return;
    release(at);
    answer_result(request->id, request->op, 0, NULL);
}

void watch_serve(void)
{
    for (struct watch *watch = watches; watch; watch = watch->next) {
        if (!watch->parked_id || watch->first == watch->after)
            continue;
        struct bytes *to = answer_begin(watch->parked_id, OP_WATCH_READ);
        uint32_t count = 0;
        put_u64(to, watch->first);
        size_t count_at = to->length;
        put_u32(to, 0);
        for (uint64_t n = watch->first;
             n < watch->after && count < ANSWER_EVENTS && to->length < ANSWER_BYTES; n++, count++) {
            const struct event *event = &watch->events[n % EVENTS_MOST];
            put_u8(to, (uint8_t)event->kind);
            put_u8(to, event->directory);
            put_text(to, event->path);
        }
        memcpy(to->data + count_at, &count, sizeof count);
        answer_end();
        watch->parked_id = 0;
    }
}

void watch_cancel(uint64_t id)
{
    for (struct watch *watch = watches; watch; watch = watch->next)
        if (watch->parked_id == id)
            watch->parked_id = 0;
}

void watch_parked_drop(void)
{
    for (struct watch *watch = watches; watch; watch = watch->next)
        watch->parked_id = 0;
}

void watch_end_all(void)
{
    while (watches)
        release(&watches);
}
