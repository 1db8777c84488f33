/* Loops that Python would run piece by piece, taking its own lock for each, and one that numpy and torch take twice as long for. */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define MOST 1024        /* runs that one call of the system takes */
#define HOT (256 << 10)  /* bytes that are compared while they are in the processor's cache */

const uint64_t source = SOURCE; /* the hash of this file: whoever loads it can tell that it is this one */

typedef uint32_t (*checksum)(uint32_t before, const unsigned char *data, uint64_t size);

/* isal's checksum leaves the upper halves of the wide registers in use. Until they are cleared, the system keeps and brings them back
 * with every change of threads, and other code waits for them: that took as long as the sums themselves. */
static void clear_wide_registers(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx"))
        __asm__ volatile("vzeroupper");
#endif
}

/* crc[i] becomes the checksum of run i of `count`, of the run before it too where joined[i], which the first is not; none where joined
 * is NULL. */
static void take(checksum of, int64_t count, const uint64_t *address, const int64_t *size, const uint8_t *joined, uint32_t *crc) {
    for (int64_t i = 0; i < count; i++)
        crc[i] = of(joined && joined[i] ? crc[i - 1] : 0, (const unsigned char *)(uintptr_t)address[i], (uint64_t)size[i]);
    if (count > 0)
        clear_wide_registers();
}

void sums(checksum of, int64_t count, const uint64_t *address, const int64_t *size, const uint8_t *joined, uint32_t *crc) {
    take(of, count, address, size, joined, crc);
}

/* --- samples that are compared with what an index says of them, as soon as they are whole --- */

typedef struct {
    checksum of;
    const int64_t *start, *stop, *first;            /* of samples in their shards; and of their fields among all */
    const int64_t *offset, *size;                   /* of fields in their shards */
    const uint32_t *crc;                            /* 0: not known */
    const uint16_t *field;                          /* which it is, of `fields` */
    const uint8_t *compared;                        /* whether these are compared at all */
    int64_t fields, memory, room;                   /* where samples are put, and how many bytes there are */
} packed;

typedef struct {
    const packed *by;
    const int64_t *where; /* in the memory, by place */
    uint8_t *sound;       /* by place; it is 0 */
    int64_t ring;         /* places, over and over */
} lane;

typedef struct {
    const lane *in;
    int64_t place, id, count; /* of the first, and how many follow one another */
    int64_t begun;            /* bytes of their shard before those that come */
} samples;

/* An index may say anything: what lies beyond its sample, or the memory, is not looked at, and not sound. */
static int is_sound(const packed *by, int64_t id, int64_t where) {
    int64_t start = by->start[id], extent = by->stop[id] - start;
    if (where < 0 || extent < 0 || where > by->room - extent)
        return 0;
    for (int64_t m = by->first[id]; m < by->first[id + 1]; m++) {
        int64_t within = by->offset[m] - start, size = by->size[m];
        if (by->field[m] >= by->fields || within < 0 || size < 0 || within > extent - size)
            return 0;
        if (by->crc[m] && by->compared[by->field[m]] && by->of(0, (const unsigned char *)(uintptr_t)(by->memory + where + within), (uint64_t)size) != by->crc[m])
            return 0;
    }
    return 1;
}

/* Compare those that are whole now that so many bytes are there, and were not before; none of which something came in another read. */
void compare(const samples *all, int64_t before, int64_t now) {
    const packed *by = all->in->by;
    const int64_t *start = by->start + all->id, *stop = by->stop + all->id;
    int64_t i = 0, end = all->count;
    while (i < end) { /* they follow one another */
        int64_t middle = i + (end - i) / 2;
        if (stop[middle] - all->begun > before)
            end = middle;
        else
            i = middle + 1;
    }
    for (; i < all->count && stop[i] - all->begun <= now; i++)
        if (start[i] >= all->begun) {
            int64_t place = (all->place + i) % all->in->ring;
            all->in->sound[place] = (uint8_t)is_sound(by, all->id + i, all->in->where[place]);
        }
    clear_wide_registers();
}

/* Fill `count` runs of memory with `most` bytes of a file from `offset` on, of a socket where that is below 0; `filled` bytes of them
 * are already. Of `others` runs, wherever they lie, the sums are taken as soon as upto[i] - begun bytes are filled, but for those for
 * which `summed` bytes were enough; samples are compared likewise, if there are any. Returns how many bytes came: fewer than `most` at
 * the end or before an error, which is -errno when nothing came, and once *end is not 0. */
static int64_t fill_until(const int *end, int fd, int64_t offset, int64_t most, int64_t filled, int64_t summed, int64_t count,
                          const uint64_t *address, const int64_t *size, checksum of, int64_t others, const uint64_t *other,
                          const int64_t *length, const uint8_t *joined, uint32_t *crc, const int64_t *upto, int64_t begun,
                          const samples *compared) {
    struct iovec runs[MOST];
    int64_t i = 0, j = 0, came = 0, done = filled, seen = summed;
    for (; i < count && done >= size[i]; i++)  /* `done` is then what is filled of run i */
        done -= size[i];
    while (j < others && upto[j] - begun <= summed)
        j++;
    while (i < count && came < most && !__atomic_load_n(end, __ATOMIC_RELAXED)) {
        int64_t many = 0, bytes = 0, first = j;
        for (int64_t k = i; k < count && many < MOST && bytes < HOT && bytes < most - came; k++, many++) {
            int64_t here = k == i ? done : 0, length = size[k] - here, room = most - came - bytes;
            runs[many].iov_base = (char *)(uintptr_t)address[k] + here;
            runs[many].iov_len = (size_t)(length < room ? length : room);
            bytes += (int64_t)runs[many].iov_len;
        }
        struct msghdr message = {.msg_iov = runs, .msg_iovlen = (size_t)many};
        ssize_t read = offset < 0 ? recvmsg(fd, &message, MSG_WAITALL) : preadv(fd, runs, (int)many, offset + came);
        if (read < 0 && errno == EINTR)
            continue;
        if (read < 0 && !came)
            return -errno;
        if (read < 0 || (read == 0 && bytes))
            return came;
        came += read;
        for (done += read; i < count && done >= size[i]; i++)
            done -= size[i];
        while (j < others && upto[j] - begun <= filled + came)
            j++;
        take(of, j - first, other + first, length + first, joined ? joined + first : joined, crc + first);
        if (compared)
            compare(compared, seen, filled + came);
        seen = filled + came;
        if (offset < 0 && read < bytes) /* nothing came for too long, or the end */
            return came;
    }
    return came;
}

int64_t fill(int fd, int64_t offset, int64_t most, int64_t filled, int64_t summed, int64_t count, const uint64_t *address,
             const int64_t *size, checksum of, int64_t others, const uint64_t *other, const int64_t *length, const uint8_t *joined,
             uint32_t *crc, const int64_t *upto, int64_t begun, const samples *compared) {
    const int never = 0;
    return fill_until(&never, fd, offset, most, filled, summed, count, address, size, of, others, other, length, joined, crc, upto, begun,
                      compared);
}

/* Each of `rows` rows of `size` bytes goes to `to` with its last byte first. They do not overlap. */
void turn(unsigned char *to, const unsigned char *from, int64_t rows, int64_t size) {
    for (; rows > 0; rows--, to += size, from += size) {
        int64_t i = 0;
        for (; i + 8 <= size; i += 8) {
            uint64_t eight;
            memcpy(&eight, from + size - i - 8, 8);
            eight = __builtin_bswap64(eight);
            memcpy(to + i, &eight, 8);
        }
        for (; i < size; i++)
            to[i] = from[size - 1 - i];
    }
}

/* --- pictures: parts of JPEGs, one after another, by libjpeg-turbo 3, whose functions are given --- */

typedef struct {
    int x, y, width, height;
} region; /* as the library has it */

typedef struct {
    int (*head)(void *handle, const unsigned char *data, size_t size);
    int (*get)(void *handle, int what);
    int (*crop)(void *handle, region part);
    int (*decode)(void *handle, const unsigned char *data, size_t size, unsigned char *to, int pitch, int colours);
    void *(*begin)(int what);
    void (*end)(void *handle);
} turbo; /* a handle is of one picture: it keeps the tables of those before, for one that has none of its own */

enum { DECOMPRESS = 1, SUBSAMPLING = 4, WIDTH = 5, HEIGHT = 6, COLOURS = 8, PROGRESSIVE = 12, KNOWN = 7 }; /* what `get` is asked for */

static const int blocks[KNOWN][2] = {{8, 8}, {16, 8}, {16, 16}, {8, 8}, {8, 16}, {32, 8}, {8, 32}}; /* width, height, by subsampling */

/* Whether this is a JPEG with its end. */
static int is_whole(const unsigned char *data, int64_t size) {
    return size >= 4 && !memcmp(data, "\xff\xd8\xff", 3) && !memcmp(data + size - 2, "\xff\xd9", 2);
}

/* --- orientation: as Pillow's ImageOps.exif_transpose sees it, wherever that is plain --- */

enum { NONE = 0, UPRIGHT = 1, ODD = -1 }; /* beside 1 to 8, which EXIF has */

static int64_t number(const unsigned char *at, int bytes, int big) {
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++)
        value = value << 8 | at[big ? i : bytes - 1 - i];
    return value;
}

/* By the first directory of a TIFF. ODD where Pillow stops early, skips the tag or takes another type for it. */
static int of_exif(const unsigned char *tiff, int64_t size) {
    static const unsigned char bytes[14] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4}; /* of a value, by its type */
    int big = size >= 8 && !memcmp(tiff, "MM\0*", 4);
    if (size < 8 || (!big && memcmp(tiff, "II*\0", 4)))
        return ODD;
    int64_t at = number(tiff + 4, 4, big);
    if (at > size - 2)
        return ODD;
    int64_t left = number(tiff + at, 2, big);
    for (at += 2; left > 0; left--, at += 12) {
        if (at > size - 12)
            return ODD;
        int64_t tag = number(tiff + at, 2, big), type = number(tiff + at + 2, 2, big), count = number(tiff + at + 4, 4, big);
        if (tag == 274) {
            if ((type != 3 && type != 4) || count != 1)
                return ODD;
            int64_t value = number(tiff + at + 8, bytes[type], big);
            return value >= 1 && value <= 8 ? (int)value : UPRIGHT;
        }
        if (type < 1 || type > 13 || (count * bytes[type] > 4 && number(tiff + at + 8, 4, big) > size - count * bytes[type]))
            return ODD;
    }
    return NONE;
}

/* By the first tiff:Orientation="6" or tiff:Orientation>6 of an XMP document. */
static int of_xmp(const unsigned char *text, int64_t size) {
    const unsigned char *end = text + size;
    for (const unsigned char *at = text; at < end && (at = memchr(at, 'O', (size_t)(end - at))); at++) {
        if (at - text < 5 || end - at < 13 || memcmp(at - 5, "tiff:Orientation", 16))
            continue;
        const unsigned char *value = at[11] == '>' ? at + 12 : at[11] == '=' && at[12] == '"' ? at + 13 : end;
        if (value < end && *value >= '0' && *value <= '9')
            return *value >= '1' && *value <= '8' ? *value - '0' : UPRIGHT;
    }
    return UPRIGHT;
}

/* How the picture of a JPEG lies: 1 to 8 as EXIF has it, from EXIF or else XMP before the first scan. 0 where Pillow is to be asked:
 * for bytes between segments, segments that are rare or cut, EXIF in several of them. */
int orientation(const unsigned char *data, int64_t size) {
    static const char xap[] = "http://ns.adobe.com/xap/1.0/"; /* with the 0 at its end */
    const unsigned char *exif = NULL, *xmp = NULL;
    int64_t exif_size = 0, xmp_size = 0, at = 2, length;
    if (size < 4 || memcmp(data, "\xff\xd8\xff", 3))
        return 0;
    for (; at + 4 <= size && data[at] == 0xff && data[at + 1] != 0xda; at += 2 + length) {
        int marker = data[at + 1], known = (marker & 0xf0) == 0xe0 || (marker >= 0xc0 && marker <= 0xc2);
        const unsigned char *body = data + at + 4;
        length = number(data + at + 2, 2, 1);
        if ((!known && marker != 0xc4 && marker != 0xdb && marker != 0xdd && marker != 0xfe) || length < 2 || length > size - at - 2)
            return 0;
        if (marker == 0xe1 && length >= 8 && !memcmp(body, "Exif\0", 6)) {
            if (exif)
                return 0;
            exif = body + 6;
            exif_size = length - 8;
        } else if (marker == 0xe1 && length >= 2 + (int64_t)sizeof xap && !memcmp(body, xap, sizeof xap)) {
            xmp = body + sizeof xap;
            xmp_size = length - 2 - (int64_t)sizeof xap;
        }
    }
    if (at + 4 > size || data[at] != 0xff)
        return 0;
    int found = exif ? of_exif(exif, exif_size) : NONE;
    if (found == NONE)
        return xmp ? of_xmp(xmp, xmp_size) : UPRIGHT;
    return found == ODD ? 0 : found;
}

/* Pixels of three bytes, `down` and `across` bytes apart from those below and beside them, to rows x columns that follow one another.
 * In stripes, whose lines stay in the processor's cache where `across` leads from row to row. */
void place(unsigned char *to, const unsigned char *from, int64_t rows, int64_t columns, int64_t down, int64_t across) {
    for (int64_t first = 0, stripe = 64; first < columns; first += stripe)
        for (int64_t y = 0; y < rows; y++)
            for (int64_t x = first; x < columns && x < first + stripe; x++)
                memcpy(to + 3 * (y * columns + x), from + y * down + x * across, 3);
}

/* Height, width and orientation of each picture as it is stored; 0 and 0 of one that is for others to decode. */
void heads(const turbo *by, int64_t count, const uint64_t *address, const int64_t *size, int32_t *shape) {
    for (int64_t i = 0; i < count; i++, shape += 3) {
        const unsigned char *data = (const unsigned char *)(uintptr_t)address[i];
        shape[0] = shape[1] = 0;
        shape[2] = is_whole(data, size[i]) ? orientation(data, size[i]) : 0;
        void *handle = shape[2] ? by->begin(DECOMPRESS) : NULL;
        if (!handle)
            continue;
        if (!by->head(handle, data, (size_t)size[i])) {
            int sampling = by->get(handle, SUBSAMPLING), colours = by->get(handle, COLOURS);
            if (sampling >= 0 && sampling < KNOWN && colours >= 0 && colours <= 2 && by->get(handle, PROGRESSIVE) == 0) {
                shape[0] = by->get(handle, HEIGHT);
                shape[1] = by->get(handle, WIDTH);
            }
        }
        by->end(handle);
    }
}

/* What becomes of a picture: it is there, it could not be decoded, or there is too little room for it. */
enum { THERE, NOT, FULL };

/* One picture of `parts`: `used` bytes of the room are taken, and become more. */
static int part_of(const turbo *by, void *handle, const unsigned char *data, int64_t size, const int32_t *box, int turned,
                   int mirrored, unsigned char *out, int64_t height, int64_t width, unsigned char *scratch, int64_t room,
                   int64_t *used, int64_t *lies) {
    if (by->head(handle, data, (size_t)size))
        return NOT;
    int sampling = by->get(handle, SUBSAMPLING), high = by->get(handle, HEIGHT), wide = by->get(handle, WIDTH);
    if (sampling < 0 || sampling >= KNOWN)
        return NOT;
    const int *block = blocks[sampling];
    int top = box[0], left = box[1], bottom = top + box[2] + block[1], right = left + box[3] + block[0];
    region part = {(left / block[0] - 1) * block[0], top - block[1], 0, 0};
    part.x = part.x < 0 ? 0 : part.x;
    part.y = part.y < 0 ? 0 : part.y;
    part.width = (right < wide ? right : wide) - part.x;
    part.height = (bottom < high ? bottom : high) - part.y;
    int exact = part.y == top && part.x == left && part.height == box[2] && part.width == box[3];
    int fits = exact && !turned && box[2] == height && box[3] == width, direct = fits && !mirrored;
    int64_t bytes = 3 * (int64_t)part.width * part.height;
    if (!direct && *used + bytes > room)
        return FULL;
    if (by->crop(handle, part) || by->decode(handle, data, (size_t)size, direct ? out : scratch + *used, 0, mirrored))
        return NOT;
    lies[0] = *used;
    lies[1] = part.y;
    lies[2] = part.x;
    lies[3] = fits ? 0 : part.height;
    lies[4] = part.width;
    if (fits && mirrored)
        turn(out, scratch + *used, height, 3 * width);
    else if (!fits)
        *used += bytes;
    return THERE;
}

/* Decode a part of each picture, which `heads` has seen: box[4 * i] on are its top, left, height and width, as the picture is stored.
 * What has the size of `to`, height x width, and begins and ends with blocks of the picture, goes there, turned around (`turn`) where
 * mirrored[i], but not where turned[i]; of all else one block more on each side to `scratch`, one after another. lies[5 * i] on are
 * where it begins there, and top, left, height and width of what is there; height 0 where it is in its place and -1 where the library
 * could not, or there was too little room for this one alone. Mirrored ones are BGR in scratch. Returns how many there are, without
 * the first that has no room beside the others and what follows it. *row is rows[i] meanwhile. */
int64_t parts(const turbo *by, int64_t count, const uint64_t *address, const int64_t *size, const int32_t *box, const uint8_t *turned,
              const uint8_t *mirrored, const uint64_t *to, int64_t height, int64_t width, unsigned char *scratch, int64_t room,
              int64_t *lies, int64_t *row, const int64_t *rows) {
    int64_t used = 0;
    for (int64_t i = 0; i < count; i++, box += 4, lies += 5) {
        const unsigned char *data = (const unsigned char *)(uintptr_t)address[i];
        unsigned char *out = (unsigned char *)(uintptr_t)to[i];
        *row = rows[i];
        lies[3] = -1;
        void *handle = by->begin(DECOMPRESS);
        if (!handle)
            continue;
        int came = part_of(by, handle, data, size[i], box, turned[i], mirrored[i], out, height, width, scratch, room, &used, lies);
        by->end(handle);
        if (came == FULL && used)
            return i;
    }
    return count;
}

/* --- hands: threads of Python's that fill, one after another, without Python's lock in between --- */

typedef struct job {
    struct job *next;
    int64_t number, came;
    int fd;
    int64_t offset, most, filled, summed, count;
    const uint64_t *address;
    const int64_t *size;
    checksum of;
    int64_t others;
    const uint64_t *other;
    const int64_t *length;
    const uint8_t *joined;
    uint32_t *crc;
    const int64_t *upto;
    int64_t begun;
    const samples *compared;
} job;

typedef struct {
    job *first, **end;
} line;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t more, ready; /* to do; done */
    line todo, done;
    int closed;
} queue;

static void add(line *to, job *one) {
    one->next = NULL;
    *to->end = one;
    to->end = &one->next;
}

static job *taken(line *from) {
    job *one = from->first;
    if (one && !(from->first = one->next))
        from->end = &from->first;
    return one;
}

int64_t queue_size(void) {
    return sizeof(queue);
}

void queue_begin(queue *all) {
    pthread_mutex_init(&all->lock, NULL);
    pthread_cond_init(&all->more, NULL);
    pthread_cond_init(&all->ready, NULL);
    all->todo.end = &all->todo.first;
    all->done.end = &all->done.first;
}

/* What `fill` is given, for a hand to do. 0, or -1 without memory or after the end: then it is not done. */
int queue_put(queue *all, int64_t number, int fd, int64_t offset, int64_t most, int64_t filled, int64_t summed, int64_t count,
              const uint64_t *address, const int64_t *size, checksum of, int64_t others, const uint64_t *other, const int64_t *length,
              const uint8_t *joined, uint32_t *crc, const int64_t *upto, int64_t begun, const samples *compared) {
    job *one = malloc(sizeof(job));
    if (!one)
        return -1;
    *one = (job){NULL, number, 0, fd, offset, most, filled, summed, count, address, size, of, others, other, length, joined, crc, upto, begun, compared};
    pthread_mutex_lock(&all->lock);
    int closed = all->closed;
    if (!closed) {
        add(&all->todo, one);
        pthread_cond_signal(&all->more);
    }
    pthread_mutex_unlock(&all->lock);
    if (closed)
        free(one);
    return closed ? -1 : 0;
}

/* A hand: does what there is to do, until the end. */
void queue_work(queue *all) {
    pthread_mutex_lock(&all->lock);
    while (!all->closed) {
        job *one = taken(&all->todo);
        if (!one) {
            pthread_cond_wait(&all->more, &all->lock);
            continue;
        }
        pthread_mutex_unlock(&all->lock);
        one->came = fill_until(&all->closed, one->fd, one->offset, one->most, one->filled, one->summed, one->count, one->address,
                               one->size, one->of, one->others, one->other, one->length, one->joined, one->crc, one->upto, one->begun,
                               one->compared);
        pthread_mutex_lock(&all->lock);
        if (all->closed) {
            free(one);
            break;
        }
        add(&all->done, one);
        pthread_cond_signal(&all->ready);
    }
    pthread_mutex_unlock(&all->lock);
}

/* The number of what was done next, and what `fill` returned; -1 when that was the end. */
int64_t queue_next(queue *all, int64_t *came) {
    pthread_mutex_lock(&all->lock);
    while (!all->done.first && !all->closed)
        pthread_cond_wait(&all->ready, &all->lock);
    job *one = taken(&all->done);
    pthread_mutex_unlock(&all->lock);
    if (!one)
        return -1;
    int64_t number = one->number;
    *came = one->came;
    free(one);
    return number;
}

/* The end: what nobody has begun is not done, and of what is done nothing more is told. */
void queue_close(queue *all) {
    pthread_mutex_lock(&all->lock);
    __atomic_store_n(&all->closed, 1, __ATOMIC_RELAXED);
    for (job *one; (one = taken(&all->todo)) || (one = taken(&all->done));)
        free(one);
    pthread_cond_broadcast(&all->more);
    pthread_cond_broadcast(&all->ready);
    pthread_mutex_unlock(&all->lock);
}
