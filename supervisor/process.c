/* The life of a process: start, end, timeout; see process.h for the guarantee. */
#include "process.h"

#include "guard.h"
#include "parked.h"
#include "records.h"
#include "spawn.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define QUIET (50 * MS)        /* output of background children counts as over after this silence */
#define QUIET_MOST (250 * MS)  /* and after this long in any case */
#define DYING_MOST (100 * MS)
#define DYING_LOOK (2 * MS)
#define CHASE (500 * MS)
#define READ_BUDGET (256u << 10)
#define PIPE_MOST (1u << 20) /* most that a pipe holds */
#define SHOWN_ARGV 16384

struct process *processes;
uint64_t processes_started, processes_ended;

static uint64_t next_id = 1;
static char default_user[256] = "0";
static char default_cwd[4096];
static unsigned nproc;

void process_defaults(const char *user, const char *cwd, unsigned nproc_limit)
{
    snprintf(default_user, sizeof default_user, "%s", user);
    snprintf(default_cwd, sizeof default_cwd, "%s", cwd);
    nproc = nproc_limit;
}

bool process_any_running(void)
{
    for (struct process *p = processes; p; p = p->next)
        if (p->running)
            return true;
    return false;
}

void process_dirty(struct process *process) { process->dirty = true; }

/* -- descriptors ----------------------------------------------------------------------------- */

#define OWNER(type, member, pointer) ((type *)((char *)(pointer) - offsetof(type, member)))

static void settle(struct process *p, uint64_t now)
{
    if (p->running || p->settled)
        return;
    bool held = (p->out.held && stream_open(&p->out)) || (p->err.held && stream_open(&p->err));
    bool open = stream_open(&p->out) || stream_open(&p->err);
    if (p->timed_out) {
        /* Whoever is told of the timeout may look at once whether the group is gone. */
        if (now < p->ended_at + DYING_MOST && !kill(-p->pid, 0))
            return;
    } else if (open) {
        if (held || (now < p->last_data + QUIET && now < p->ended_at + QUIET_MOST))
            return;
    }
    p->settled = true;
    process_dirty(p);
}

static void output_ready(struct process *p, struct stream *stream)
{
    if (stream_fill(stream, READ_BUDGET))
        p->last_data = now_ns();
    settle(p, p->last_data);
    process_dirty(p);
}

static void out_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct stream *stream = OWNER(struct stream, source, source);
    output_ready(OWNER(struct process, out, stream), stream);
}

static void err_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct stream *stream = OWNER(struct stream, source, source);
    output_ready(OWNER(struct process, err, stream), stream);
}

void process_feed(struct process *p)
{
    size_t at = 0;
    while (p->in.fd >= 0 && at < p->in_queue.length) {
        ssize_t n = write(p->in.fd, p->in_queue.data + at, p->in_queue.length - at);
        if (n > 0) {
            at += (size_t)n;
        } else if (errno == EINTR) {
            continue;
        } else if (errno == EAGAIN) {
            break;
        } else {
            /* The process has closed its input: what comes is taken and thrown away. */
            p->in_broken = true;
            loop_close(&p->in);
        }
    }
    if (p->in.fd < 0) {
        bytes_free(&p->in_queue);
    } else {
        bytes_drop_front(&p->in_queue, at);
        if (p->in_queue.length)
            loop_watch(&p->in, EPOLLOUT);
        else if (p->in_eof && !parked_writes(p))
            loop_close(&p->in);
        else
            loop_unwatch(&p->in);
    }
}

static void in_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct process *p = OWNER(struct process, in, source);
    process_feed(p);
    process_dirty(p);
}

/* -- start ----------------------------------------------------------------------------------- */

struct start {
    uint32_t flags;
    uint8_t stdin_mode;
    uint64_t timeout_ns, keep;
    uint16_t rows, columns;
    char *tag, *user, *cwd;
    char **argv, **env;
    uint32_t argc, envc;
    const unsigned char *input;
    uint32_t input_length;
};

static char **get_texts(struct reader *body, uint32_t *count)
{
    *count = get_u32(body);
    /* Each takes at least five bytes on the wire, so the count cannot ask for much memory. */
    if (body->bad || *count > (size_t)(body->end - body->at) / 5) {
        body->bad = true;
        *count = 0;
    }
    char **texts = checked_calloc(*count + 1, sizeof *texts);
    for (uint32_t i = 0; i < *count; i++)
        texts[i] = get_text(body, NULL);
    return texts;
}

static void parse(struct reader *body, struct start *start)
{
    memset(start, 0, sizeof *start);
    start->flags = get_u32(body);
    start->stdin_mode = get_u8(body);
    start->timeout_ns = get_u64(body);
    start->keep = get_u64(body);
    start->rows = get_u16(body);
    start->columns = get_u16(body);
    start->tag = get_text(body, NULL);
    start->user = get_text(body, NULL);
    start->cwd = get_text(body, NULL);
    start->argv = get_texts(body, &start->argc);
    start->env = get_texts(body, &start->envc);
    start->input = get_blob(body, &start->input_length);
}

static size_t name_length(const char *setting) { return strcspn(setting, "="); }

static bool has(char **env, size_t count, const char *setting)
{
    size_t length = name_length(setting);
    for (size_t i = 0; i < count; i++)
        if (name_length(env[i]) == length && !memcmp(env[i], setting, length))
            return true;
    return false;
}

struct identity {
    char home[520], user[140], logname[140];
};

/* The request's settings win over the session's, those over what follows from the user. */
static char **environment(const struct start *start, const struct user *user, bool other_user,
                          struct identity *identity)
{
    extern char **environ;
    size_t inherited = 0, n = 0;
    while (environ[inherited])
        inherited++;
    char **all = checked_calloc(start->envc + inherited + 8, sizeof *all);
    for (uint32_t i = 0; i < start->envc; i++)
        all[n++] = start->env[i];
    snprintf(identity->home, sizeof identity->home, "HOME=%s", user->home);
    snprintf(identity->user, sizeof identity->user, "USER=%s", user->name);
    snprintf(identity->logname, sizeof identity->logname, "LOGNAME=%s", user->name);
    char *derived[] = {identity->home, user->name[0] ? identity->user : NULL,
                       user->name[0] ? identity->logname : NULL};
    if (other_user)
        for (int i = 0; i < 3; i++)
            if (derived[i] && !has(all, n, derived[i]))
                all[n++] = derived[i];
    for (size_t i = 0; i < inherited; i++)
        if (!has(all, n, environ[i]))
            all[n++] = environ[i];
    for (int i = 0; i < 3; i++)
        if (derived[i] && !has(all, n, derived[i]))
            all[n++] = derived[i];
    char *path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    if (!has(all, n, path))
        all[n++] = path;
    if ((start->flags & START_PTY) && !has(all, n, "TERM="))
        all[n++] = "TERM=xterm-256color";
    return all;
}

static int open_terminal(const struct start *start, const struct user *user, int *slave)
{
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (master < 0)
        return -1;
    int unlock = 0;
    unsigned number;
    char name[32];
    struct winsize size = {.ws_row = start->rows, .ws_col = start->columns};
    *slave = -1;
    if (!ioctl(master, TIOCSPTLCK, &unlock) && !ioctl(master, TIOCGPTN, &number)) {
        snprintf(name, sizeof name, "/dev/pts/%u", number);
        *slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    }
    if (*slave < 0) {
        int error = errno;
        close(master);
        errno = error;
        return -1;
    }
    ioctl(master, TIOCSWINSZ, &size);
    /* The command must be able to open its own terminal again; not every kernel lets us say so. */
    int unchanged = fchown(*slave, user->uid, user->gid);
    (void)unchanged;
    return master;
}

struct descriptors {
    int in, out, err;             /* of the child */
    int own_in, own_out, own_err; /* of the supervisor */
};

static void close_all(const int *numbers, int count)
{
    for (int i = 0; i < count; i++) {
        bool twice = false;
        for (int k = 0; k < i; k++)
            twice |= numbers[k] == numbers[i];
        if (numbers[i] >= 0 && !twice)
            close(numbers[i]);
    }
}

static int make_pipe(int *reading, int *writing, bool own_reads)
{
    int pair[2];
    if (pipe2(pair, O_CLOEXEC) < 0)
        return -1;
    *reading = pair[0];
    *writing = pair[1];
    return fcntl(own_reads ? pair[0] : pair[1], F_SETFL, O_NONBLOCK);
}

static enum stage open_descriptors(const struct start *start, const struct user *user,
                                   struct descriptors *d)
{
    *d = (struct descriptors){-1, -1, -1, -1, -1, -1};
    if (start->flags & START_PTY) {
        d->own_out = open_terminal(start, user, &d->in);
        if (d->own_out < 0)
            return STAGE_PTY;
        d->out = d->err = d->in;
        d->own_in = fcntl(d->own_out, F_DUPFD_CLOEXEC, 3);
        return d->own_in < 0 ? STAGE_PTY : STAGE_NONE;
    }
    if (start->stdin_mode == STDIN_NULL)
        d->in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    else
        make_pipe(&d->in, &d->own_in, false);
    if (d->in < 0 || make_pipe(&d->own_out, &d->out, true) < 0 ||
        make_pipe(&d->own_err, &d->err, true) < 0)
        return STAGE_SPAWN;
    return STAGE_NONE;
}

static void remember_argv(struct process *p, const struct start *start)
{
    size_t size = 0;
    uint32_t count = 0;
    while (count < start->argc && size + strlen(start->argv[count]) + 1 <= SHOWN_ARGV)
        size += strlen(start->argv[count++]) + 1;
    p->argv = checked_malloc(count * sizeof(char *) + size);
    p->argc = count;
    char *at = (char *)(p->argv + count);
    for (uint32_t i = 0; i < count; i++) {
        p->argv[i] = at;
        at = stpcpy(at, start->argv[i]) + 1;
    }
}

static struct process *new_process(const struct start *start, const struct descriptors *d,
                                   pid_t pid)
{
    struct process *p = checked_calloc(1, sizeof *p);
    p->id = next_id++;
    p->pid = pid;
    p->running = true;
    p->pty = start->flags & START_PTY;
    p->exit_code = p->signal = -1;
    p->started_ns = wall_clock();
    p->last_data = now_ns();
    p->deadline = start->timeout_ns ? p->last_data + start->timeout_ns : NEVER;
    p->out.source = (struct source){.fd = d->own_out, .ready = out_ready};
    p->err.source = (struct source){.fd = d->own_err, .ready = err_ready};
    p->in = (struct source){.fd = d->own_in, .ready = in_ready};
    p->out.keep = p->err.keep = start->keep ? start->keep : 1;
    p->out.lossless = p->err.lossless = start->flags & START_LOSSLESS;
    p->tag = strdup(start->tag);
    remember_argv(p, start);
    loop_watch(&p->out.source, EPOLLIN);
    if (d->own_err >= 0)
        loop_watch(&p->err.source, EPOLLIN);
    p->next = processes;
    processes = p;
    processes_started++;
    return p;
}

static struct process *start_process(struct request *request)
{
    struct start start;
    struct process *p = NULL;
    struct user user;
    struct descriptors d = {-1, -1, -1, -1, -1, -1};
    struct identity identity;
    char **env = NULL;
    enum stage stage = STAGE_NONE;
    int error = 0;
    const char *about = "";

    parse(&request->body, &start);
    if (request->body.bad)
        goto done;
    if (!start.argc) {
        error = EINVAL;
        stage = STAGE_EXEC;
        about = "no command";
        goto done;
    }
    const char *name = start.flags & START_HAS_USER ? start.user : default_user;
    if ((error = user_find(name, &user))) {
        stage = STAGE_USER;
        about = name;
        goto done;
    }
    if ((stage = open_descriptors(&start, &user, &d))) {
        error = errno;
        goto done;
    }
    bool other = (start.flags & START_HAS_USER) && strcmp(name, default_user) != 0;
    env = environment(&start, &user, other, &identity);
    struct stat status;
    struct spawn spawn = {
        .argv = start.argv,
        .envp = env,
        .user = &user,
        .stdin_fd = d.in,
        .stdout_fd = d.out,
        .stderr_fd = d.err,
        .terminal = start.flags & START_PTY,
        .process_limit = nproc,
    };
    if (start.flags & START_HAS_CWD)
        spawn.cwd = start.cwd;
    else if (default_cwd[0] && !stat(default_cwd, &status) && S_ISDIR(status.st_mode))
        spawn.cwd = default_cwd;
    pid_t pid = spawn_run(&spawn);
    if (pid < 0) {
        error = spawn.error;
        stage = spawn.stage;
        about = stage == STAGE_CWD ? start.cwd : stage == STAGE_USER ? name : start.argv[0];
        goto done;
    }
    close_all((int[]){d.in, d.out, d.err}, 3);
    p = new_process(&start, &d, pid);
    if (start.stdin_mode == STDIN_INLINE) {
        bytes_append(&p->in_queue, start.input, start.input_length);
        p->in_eof = true;
        process_feed(p);
    }
    guard_started();
done:
    if (!p && !request->body.bad) {
        close_all((int[]){d.in, d.out, d.err, d.own_in, d.own_out, d.own_err}, 6);
        answer_error(request->id, request->op, error, stage, about);
    }
    free(env);
    free(start.argv);
    free(start.env);
    return p;
}

void process_start(struct request *request)
{
    struct process *p = start_process(request);
    if (p) {
        process_put_state(p, answer_begin(request->id, request->op));
        answer_end();
    }
}

void process_run(struct request *request)
{
    struct process *p;
    for (p = processes; p; p = p->next)
        if (p->run_id == request->id && p->run_client == connection_client())
            break; /* asked again after a reconnect */
    if (!p && (p = start_process(request))) {
        p->run_id = request->id;
        p->run_until = p->out.lossless ? now_ns() + RUN_PATIENCE : NEVER;
        p->run_client = connection_client();
    }
    if (p)
        parked_add(p, request, 0, 0, 0);
}

void process_hurry(void)
{
    for (struct process *p = processes; p; p = p->next)
        if (p->run_id && p->parked && p->run_until != NEVER) {
            p->run_until = 0;
            process_dirty(p);
        }
    process_serve();
}

/* -- end ------------------------------------------------------------------------------------- */

static void ended(struct process *p, int status)
{
    p->running = false;
    p->ended_ns = wall_clock();
    p->ended_at = now_ns();
    p->deadline = NEVER;
    if (WIFEXITED(status))
        p->exit_code = WEXITSTATUS(status);
    else
        p->signal = WTERMSIG(status);
    processes_ended++;
    loop_close(&p->in);
    bytes_free(&p->in_queue);
    /* What the process itself wrote is in the pipes by now; what a child that lives on writes
     * meanwhile could keep this reading for ever. */
    stream_fill(&p->out, PIPE_MOST);
    stream_fill(&p->err, PIPE_MOST);
    p->last_data = p->ended_at;
    settle(p, p->ended_at);
    process_dirty(p);
}

unsigned process_reap(void)
{
    unsigned count = 0;
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        count++;
        for (struct process *p = processes; p; p = p->next)
            if (p->pid == pid && p->running) {
                ended(p, status);
                break;
            }
    }
    return count;
}

unsigned process_kill_session(pid_t sid)
{
    unsigned found = 0;
    kill(-sid, SIGKILL); /* at one instant, as far as the group goes */
    DIR *directory = opendir("/proc");
    if (!directory)
        return 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
        if (pid > 1 && getsid(pid) == sid) {
            found++;
            kill(pid, SIGKILL);
        }
    }
    closedir(directory);
    return found;
}

uint64_t process_timers(uint64_t now)
{
    uint64_t next = NEVER;
    for (struct process *p = processes; p; p = p->next) {
        if (p->running && now >= p->deadline) {
            if (!p->timed_out) {
                p->timed_out = true;
                p->chase_until = now + CHASE;
            }
            process_kill_session(p->pid);
            p->deadline = now + 100 * MS; /* again, until it is gone */
        } else if (!p->running && p->chase_until) {
            /* A child forked in the moment of the kill: look once more after the end. */
            if (!process_kill_session(p->pid) || now >= p->chase_until)
                p->chase_until = 0;
            else if (now + 20 * MS < next)
                next = now + 20 * MS;
        }
        if (p->running && p->deadline < next)
            next = p->deadline;
        if (p->run_id && p->running && p->parked && p->run_until != NEVER) {
            /* Whoever watches a long command wants to see it, and to know how to reach it. */
            if (now >= p->run_until)
                process_dirty(p);
            else if (p->run_until < next)
                next = p->run_until;
        }
        if (!p->running && !p->settled) {
            settle(p, now);
            if (!p->settled && (p->timed_out || (!p->out.held && !p->err.held))) {
                uint64_t quiet = p->last_data + QUIET, most = p->ended_at + QUIET_MOST;
                uint64_t due = quiet < most ? quiet : most;
                if (p->timed_out)
                    due = now + DYING_LOOK;
                if (due < next)
                    next = due;
            }
        }
    }
    return next;
}

void process_serve(void)
{
    static bool was_full;
    bool full = connection_full(), again = was_full && !full;
    was_full = full;
    for (struct process *p = processes, *next; p; p = next) {
        next = p->next;
        for (p->dirty |= again; p->dirty;) {
            p->dirty = false;
            parked_serve(p);
            settle(p, now_ns());
        }
        if (p->forgotten && p->settled && !stream_open(&p->out) && !stream_open(&p->err))
            process_release(p);
    }
    records_bound();
}
