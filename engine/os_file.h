// Layer 0: writing a file so that at every moment the old or the new one is there, whole.
//
// The bytes go to a temporary file beside the target, ".NAME.saveK" with K below OS_REPLACE_SLOTS,
// which is synchronised, renamed over the target, and the folder is synchronised. A live writer
// holds a lock on its temporary file; so a later save of the same path tells the leftovers of dead
// processes, which it removes, from the files of those at work, which it leaves alone.
#ifndef MF_OS_FILE_H
#define MF_OS_FILE_H

#include <sys/types.h>

#include "base.h"

enum {
    OS_REPLACE_SLOTS = 16,  // writers of one path at the same time
    OS_NAME_BYTES = 256     // of a file's name without its folder, with the final 0
};

typedef struct os_replace {
    const char *path;               // borrowed, for messages
    int folder, fd;                 // open from begin to commit or abort, else -1
    mode_t mode;                    // of the new file once it is complete
    uint64_t n_kept;                // bytes written since the disk was last given some
    char name[OS_NAME_BYTES];       // of the target in its folder
    char temporary[OS_NAME_BYTES];  // of the new file in the same folder
} os_replace;

// Begins to replace (or create) the file `path`, a string that outlives `r`. The new file has the
// permissions of the old one, 0600 if there is none. Refused (MF_IO): a target that is a folder, a
// device, a FIFO or a socket, and one that is a symbolic link, which is neither followed nor
// replaced. A hard link is replaced under this name only.
int os_replace_begin(os_replace *r, const char *path);
// Bytes [offset, offset + n) of the new file; what is never written reads as 0. After a failure
// only os_replace_abort is left.
int os_replace_write(os_replace *r, uint64_t offset, const void *bytes, size_t n);
// The new file takes the old one's place. On failure the old one stands and no temporary file is
// left, with one exception that the message names: the folder could not be synchronised, the new
// file is in place and whole, but a power cut may bring the old one back. `r` is done either way.
int os_replace_commit(os_replace *r);
// Gives up: the old file stands, the new one is removed. Does nothing when done already.
void os_replace_abort(os_replace *r);

#endif
