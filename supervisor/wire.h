/* The frames between supervisor and node, as written down in docs/formats/wire.md.
 *
 * Guarantee: numbers here never change meaning within one VERSION. */
#ifndef SOJOURN_WIRE_H
#define SOJOURN_WIRE_H

#include <stdint.h>

#define WIRE_MAGIC 0x4e524a53u /* "SJRN" */
#define WIRE_VERSION 1
#define MAX_BODY (1u << 20)
#define PIECE (256u << 10) /* most bytes of output or of a file in one answer */
#define CLIENT_ID_SIZE 16

#define STATUS_MORE 0x8000u /* further frames of this answer follow */

struct frame_header {
    uint32_t length; /* of the body */
    uint16_t op;
    uint16_t status; /* answers: 0 or an errno, perhaps with STATUS_MORE */
    uint64_t id;
    uint64_t ack; /* requests: an answer that arrived and may be forgotten, or 0 */
} __attribute__((packed));

enum op {
    OP_HELLO = 1, /* supervisor to node, unasked */
    OP_ATTACH = 2,
    OP_DETACH = 3,
    OP_ACK = 4,    /* no answer */
    OP_CANCEL = 5, /* no answer */
    OP_INFO = 6,

    OP_START = 16,
    OP_RUN = 17,
    OP_WAIT = 18,
    OP_OUTPUT = 19,
    OP_WRITE = 20,
    OP_CLOSE_STDIN = 21,
    OP_SIGNAL = 22,
    OP_RESIZE = 23,
    OP_PROCESSES = 24,
    OP_FORGET = 25,
    OP_PROCESS = 26,

    OP_STAT = 32,
    OP_LIST = 33,
    OP_READ = 34,
    OP_WRITE_FILE = 35,
    OP_WRITE_BEGIN = 36,
    OP_WRITE_DATA = 37,
    OP_WRITE_END = 38,
    OP_WRITE_ABORT = 39,
    OP_MKDIR = 40,
    OP_REMOVE = 41,
    OP_MOVE = 42,
    OP_CHMOD = 43,
    OP_CHOWN = 44,
    OP_UTIME = 45,
    OP_SYMLINK = 46,
    OP_LINK = 47,
    OP_MKNOD = 48,
    OP_WATCH = 49,
    OP_WATCH_READ = 50,
    OP_WATCH_END = 51,

    OP_ACTIVITY = 64,
    OP_UNLINKED = 65,
    OP_SYNC = 66,
    OP_REFRESH = 67,
    OP_NETWORK = 68,
    OP_DIAL = 69,
};

/* In HELLO: what a supervisor of an older memory image cannot do. */
enum feature {
    FEATURE_TUNNELS = 1,
    FEATURE_TRANSPARENT = 2,
};

/* Where a request failed, first byte of the body of every answer that carries an errno. */
enum stage {
    STAGE_NONE = 0,
    STAGE_USER = 1,
    STAGE_CWD = 2,
    STAGE_EXEC = 3,
    STAGE_SPAWN = 4,
    STAGE_PTY = 5,
};

enum start_flag {
    START_LOSSLESS = 1,
    START_PTY = 2,
    START_HAS_CWD = 4,
    START_HAS_USER = 8,
};

enum stdin_mode { STDIN_NULL = 0, STDIN_PIPE = 1, STDIN_INLINE = 2 };

enum process_flag {
    PROCESS_RUNNING = 1,
    PROCESS_PTY = 2,
    PROCESS_TIMED_OUT = 4,
    PROCESS_EXITED = 8,
    PROCESS_SIGNALED = 16,
    PROCESS_HAS_REASON = 32,
};

#endif
