/* The loops of `bulk` that Python would run piece by piece, taking its own lock for each. */
#include <errno.h>
#include <stdint.h>
#include <sys/uio.h>

#define MOST 1024        /* runs that one call of the system takes */
#define HOT (256 << 10)  /* bytes that are compared while they are in the processor's cache */

const uint64_t source = SOURCE; /* the hash of this file: whoever loads it can tell that it is this one */

typedef uint32_t (*checksum)(uint32_t before, const unsigned char *data, uint64_t size);

/* crc[i] becomes the checksum of run i of `count` runs of a memory. Returns 1 when one is beyond its end: the others mean nothing. */
int checksums(checksum of, const unsigned char *memory, int64_t end, int64_t count, const int64_t *start, const int64_t *size,
              uint32_t *crc) {
    for (int64_t i = 0; i < count; i++) {
        if (start[i] < 0 || size[i] < 0 || size[i] > end || start[i] > end - size[i])
            return 1;
        crc[i] = of(0, memory + start[i], (uint64_t)size[i]);
    }
    return 0;
}

/* Fill `count` runs of memory with a file's bytes from `offset` on; `done` bytes of them are filled already, with those before it.
 * crc[i] becomes the checksum of run i where checked[i] is 1, of the one before too where it is 2. Returns how many bytes came: fewer than
 * there is room for at the file's end or before an error, which is -errno when nothing came. */
int64_t fill(int fd, int64_t offset, int64_t done, int64_t count, const uint64_t *address, const int64_t *size, checksum of,
             const uint8_t *checked, uint32_t *crc) {
    struct iovec runs[MOST];
    int64_t i = 0, came = 0;
    for (; i < count && done >= size[i]; i++)  /* `done` is then what is filled of run i */
        done -= size[i];
    while (i < count) {
        int64_t many = 0, bytes = 0;
        for (int64_t k = i; k < count && many < MOST && bytes < HOT; k++, many++) {
            runs[many].iov_base = (char *)(uintptr_t)address[k] + (k == i ? done : 0);
            runs[many].iov_len = (size_t)(size[k] - (k == i ? done : 0));
            bytes += (int64_t)runs[many].iov_len;
        }
        ssize_t read = preadv(fd, runs, (int)many, offset + came);
        if (read < 0 && errno == EINTR)
            continue;
        if (read < 0 && !came)
            return -errno;
        if (read < 0 || (read == 0 && bytes))
            return came;
        came += read;
        for (done += read; i < count && done >= size[i]; i++) {
            done -= size[i];
            if (of && checked[i])
                crc[i] = of(checked[i] == 2 ? crc[i - 1] : 0, (const unsigned char *)(uintptr_t)address[i], (uint64_t)size[i]);
        }
    }
    return came;
}
