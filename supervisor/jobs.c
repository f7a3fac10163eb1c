/* Long file work in processes of its own; see jobs.h for the guarantee. */
#include "jobs.h"

#include "loop.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

struct job {
    struct source source; /* the job's result, or its early end */
    struct job *next;
    uint64_t id, client;
    uint16_t op;
    char *about;
};

static struct job *jobs;

static void result_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct job *job = (struct job *)source;
    int error;
    if (read(source->fd, &error, sizeof error) != (ssize_t)sizeof error)
        error = EINTR; /* it was killed */
    loop_close(source);
    for (struct job **at = &jobs; *at; at = &(*at)->next)
        if (*at == job) {
            *at = job->next;
            break;
        }
    if (job->client == connection_client())
        answer_result(job->id, job->op, error, job->about);
    free(job->about);
    free(job);
}

/* The child must hold neither the connection, which has to be gone at a freeze, nor any pipe, whose
 * reader would wait for its end. */
static void close_others(int kept)
{
    if (!close_range(3, (unsigned)kept - 1, 0) && !close_range((unsigned)kept + 1, ~0u, 0))
        return;
    /* A sandbox kernel without that call takes more than a second to close what is not open. */
    DIR *open = opendir("/proc/self/fd");
    if (open) {
        struct dirent *entry;
        while ((entry = readdir(open))) {
            int fd = atoi(entry->d_name);
            if (fd > 2 && fd != kept && fd != dirfd(open))
                close(fd);
        }
        closedir(open);
        return;
    }
    long most = sysconf(_SC_OPEN_MAX);
    for (int fd = 3; fd < (most > 0 && most < 65536 ? most : 65536); fd++)
        if (fd != kept)
            close(fd);
}

void jobs_start(const struct request *request, const char *first, const char *second,
                int (*work)(const char *first, const char *second))
{
    int pair[2];
    if (pipe2(pair, O_CLOEXEC) < 0) {
        answer_result(request->id, request->op, errno, first);
        return;
    }
    pid_t pid = fork();
    if (pid < 0) {
        int error = errno;
        close(pair[0]);
        close(pair[1]);
        answer_result(request->id, request->op, error, first);
        return;
    }
    if (!pid) {
        close_others(pair[1]);
        int error = work(first, second);
        _exit(write(pair[1], &error, sizeof error) == (ssize_t)sizeof error ? 0 : 1);
    }
    close(pair[1]);
    struct job *job = checked_calloc(1, sizeof *job);
    job->source = (struct source){.fd = pair[0], .ready = result_ready};
    job->id = request->id;
    job->client = connection_client();
    job->op = request->op;
    job->about = strdup(first);
    job->next = jobs;
    jobs = job;
    loop_watch(&job->source, EPOLLIN);
}

bool jobs_running(uint64_t id)
{
    for (struct job *job = jobs; job; job = job->next)
        if (job->id == id && job->client == connection_client())
            return true;
    return false;
}

void jobs_disown(void)
{
    for (struct job *job = jobs; job; job = job->next)
        job->client = 0; /* clients count from one */
}
