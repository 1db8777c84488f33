/* Loops over many samples that run without the GIL: checksums and JPEG decoding.
 *
 * Python calls these functions through ctypes with the addresses of NumPy arrays. A change of a
 * signature or a struct must change `kernels.py` too. `source` is the hash of this file: a library
 * that was compiled from another source is not used. */
#include <stdint.h>
#include <string.h>

const uint64_t source = SOURCE;

typedef uint32_t (*crc_function)(uint32_t before, const unsigned char *data, uint64_t size);

/* isal's crc32 leaves the upper halves of the AVX registers in use. Every thread switch would save
 * and restore them, and SSE code would run slower, until they are cleared. */
static void clear_wide_registers(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx"))
        __asm__ volatile("vzeroupper");
#endif
}

/* --- checksums --- */

/* Compute the crc32 of each of `count` runs of memory. */
void checksum_runs(crc_function crc32, int64_t count, const uint64_t *address, const int64_t *size,
                   uint32_t *crc) {
    for (int64_t i = 0; i < count; i++)
        crc[i] = crc32(0, (const unsigned char *)(uintptr_t)address[i], (uint64_t)size[i]);
    clear_wide_registers();
}

/* --- arrays --- */

/* Copy the rest of each of `count` files that has this head and `row` bytes behind it to its place
 * in `to`; copied[i] says whether file i has. `to` holds `count` places of `row` bytes. */
void copy_arrays(int64_t count, const uint64_t *address, const int64_t *size,
                 const unsigned char *head, int64_t head_size, unsigned char *const *to,
                 int64_t row, unsigned char *copied) {
    for (int64_t i = 0; i < count; i++) {
        const unsigned char *data = (const unsigned char *)(uintptr_t)address[i];
        copied[i] = size[i] == head_size + row && !memcmp(data, head, (size_t)head_size);
        if (copied[i])
            memcpy(to[i], data + head_size, (size_t)row);
    }
}

/* --- pixels --- */

/* Copy `rows` rows of `size` bytes with the bytes of each row in reverse order. `to` and `from`
 * must not overlap. */
void reverse_rows(unsigned char *to, const unsigned char *from, int64_t rows, int64_t size) {
    for (; rows > 0; rows--, to += size, from += size) {
        int64_t i = 0;
        for (; i + 8 <= size; i += 8) {
            uint64_t eight_bytes;
            memcpy(&eight_bytes, from + size - i - 8, 8);
            eight_bytes = __builtin_bswap64(eight_bytes);
            memcpy(to + i, &eight_bytes, 8);
        }
        for (; i < size; i++)
            to[i] = from[size - 1 - i];
    }
}

/* Copy pixels of three bytes to contiguous rows. row_stride, column_stride: bytes between
 * neighbors in `from`; may be negative. Stripes of columns keep the source lines in the CPU cache
 * if column_stride leads from row to row. */
void copy_pixels(unsigned char *to, const unsigned char *from, int64_t rows, int64_t columns,
                 int64_t row_stride, int64_t column_stride) {
    for (int64_t first = 0, stripe = 64; first < columns; first += stripe)
        for (int64_t y = 0; y < rows; y++)
            for (int64_t x = first; x < columns && x < first + stripe; x++)
                memcpy(to + 3 * (y * columns + x), from + y * row_stride + x * column_stride, 3);
}

/* --- orientation of a JPEG, as Pillow's ImageOps.exif_transpose determines it --- */

enum { MISSING = 0, UPRIGHT = 1, UNCLEAR = -1 }; /* beside EXIF's 1 to 8 */

static int64_t read_integer(const unsigned char *data, int bytes, int big_endian) {
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++)
        value = value << 8 | data[big_endian ? i : bytes - 1 - i];
    return value;
}

/* Orientation in the first directory of a TIFF. UNCLEAR where Pillow stops early, skips the tag or
 * reads another type. */
static int exif_orientation(const unsigned char *tiff, int64_t size) {
    /* bytes of a value, by type */
    static const unsigned char type_bytes[14] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4};
    int big_endian = size >= 8 && !memcmp(tiff, "MM\0*", 4);
    if (size < 8 || (!big_endian && memcmp(tiff, "II*\0", 4)))
        return UNCLEAR;
    int64_t position = read_integer(tiff + 4, 4, big_endian);
    if (position > size - 2)
        return UNCLEAR;
    int64_t entries = read_integer(tiff + position, 2, big_endian);
    for (position += 2; entries > 0; entries--, position += 12) {
        if (position > size - 12)
            return UNCLEAR;
        const unsigned char *entry = tiff + position;
        int64_t tag = read_integer(entry, 2, big_endian),
                type = read_integer(entry + 2, 2, big_endian);
        int64_t count = read_integer(entry + 4, 4, big_endian);
        if (tag == 274) {
            if ((type != 3 && type != 4) || count != 1)
                return UNCLEAR;
            int64_t value = read_integer(entry + 8, type_bytes[type], big_endian);
            return value >= 1 && value <= 8 ? (int)value : UPRIGHT;
        }
        if (type < 1 || type > 13)
            return UNCLEAR;
        int64_t bytes = count * type_bytes[type];
        if (bytes > 4 && read_integer(entry + 8, 4, big_endian) > size - bytes)
            return UNCLEAR;
    }
    return MISSING;
}

/* Orientation by the first tiff:Orientation="6" or tiff:Orientation>6 of an XMP document. */
static int xmp_orientation(const unsigned char *text, int64_t size) {
    const unsigned char *end = text + size;
    for (const unsigned char *word = text;
         word < end && (word = memchr(word, 'O', (size_t)(end - word))); word++) {
        if (word - text < 5 || end - word < 13 || memcmp(word - 5, "tiff:Orientation", 16))
            continue;
        const unsigned char *value = word[11] == '>'                      ? word + 12
                                     : word[11] == '=' && word[12] == '"' ? word + 13
                                                                          : end;
        if (value < end && *value >= '0' && *value <= '9')
            return *value >= '1' && *value <= '8' ? *value - '0' : UPRIGHT;
    }
    return UPRIGHT;
}

/* Return the orientation of a JPEG, 1 to 8 as in EXIF: by the EXIF segment before the first scan,
 * else by XMP. Returns 0 if only Pillow can tell: bytes between segments, rare or truncated
 * segments, several EXIF segments. */
int orientation(const unsigned char *data, int64_t size) {
    static const char xmp_prefix[] =
        "http://ns.adobe.com/xap/1.0/"; /* including the 0 at its end */
    const unsigned char *exif = NULL, *xmp = NULL;
    int64_t exif_size = 0, xmp_size = 0, position = 2, length;
    if (size < 4 || memcmp(data, "\xff\xd8\xff", 3))
        return 0;
    for (; position + 4 <= size && data[position] == 0xff && data[position + 1] != 0xda;
         position += 2 + length) {
        int marker = data[position + 1];
        int is_known = (marker & 0xf0) == 0xe0 || (marker >= 0xc0 && marker <= 0xc2) ||
                       marker == 0xc4 || marker == 0xdb || marker == 0xdd || marker == 0xfe;
        const unsigned char *body = data + position + 4;
        length = read_integer(data + position + 2, 2, 1);
        if (!is_known || length < 2 || length > size - position - 2)
            return 0;
        if (marker == 0xe1 && length >= 8 && !memcmp(body, "Exif\0", 6)) {
            if (exif)
                return 0;
            exif = body + 6;
            exif_size = length - 8;
        } else if (marker == 0xe1 && length >= 2 + (int64_t)sizeof xmp_prefix &&
                   !memcmp(body, xmp_prefix, sizeof xmp_prefix)) {
            xmp = body + sizeof xmp_prefix;
            xmp_size = length - 2 - (int64_t)sizeof xmp_prefix;
        }
    }
    if (position + 4 > size || data[position] != 0xff)
        return 0;
    int result = exif ? exif_orientation(exif, exif_size) : MISSING;
    if (result == MISSING)
        return xmp ? xmp_orientation(xmp, xmp_size) : UPRIGHT;
    return result == UNCLEAR ? 0 : result;
}

/* --- JPEGs of a batch, decoded by libjpeg-turbo 3, whose functions the caller provides --- */

typedef struct {
    int x, y, width, height;
} region; /* tjregion */

typedef struct {
    int (*read_header)(void *handle, const unsigned char *data, size_t size);
    int (*get)(void *handle, int parameter);
    int (*crop)(void *handle, region region);
    int (*decode)(void *handle, const unsigned char *data, size_t size, unsigned char *to,
                  int pitch, int pixel_format);
    void *(*init)(int kind);
    void (*destroy)(void *handle);
} turbo;

enum { DECOMPRESS = 1 };                                                           /* for `init` */
enum { SUBSAMPLING = 4, WIDTH = 5, HEIGHT = 6, COLORSPACE = 8, PROGRESSIVE = 12 }; /* for `get` */
enum { SUBSAMPLINGS = 7 };

/* width and height, by subsampling */
static const int block_sizes[SUBSAMPLINGS][2] = {{8, 8},  {16, 8}, {16, 16}, {8, 8},
                                                 {8, 16}, {32, 8}, {8, 32}};

/* Return whether the bytes begin and end like a JPEG. */
static int is_complete(const unsigned char *data, int64_t size) {
    return size >= 4 && !memcmp(data, "\xff\xd8\xff", 3) && !memcmp(data + size - 2, "\xff\xd9", 2);
}

/* Return whether the first end marker is at the end. A progressive JPEG with an earlier one may lack
 * scans, which releases of libjpeg smooth differently. */
static int has_one_end(const unsigned char *data, int64_t size) {
    const unsigned char *last = data + size - 2, *byte = data;
    while ((byte = memchr(byte, 0xff, (size_t)(last - byte))) && byte[1] != 0xd9)
        byte++;
    return !byte;
}

/* Write height, width (both as stored) and orientation of each image to `shape`. Height and width
 * are 0 for an image that `decode_regions` must not get: not a complete JPEG, progressive with an
 * early end marker, an unusual color space or subsampling, an unclear orientation. Every image gets
 * a new handle: a handle keeps tables of the image before. */
void read_headers(const turbo *library, int64_t count, const uint64_t *address, const int64_t *size,
                  int32_t *shape) {
    for (int64_t i = 0; i < count; i++, shape += 3) {
        const unsigned char *data = (const unsigned char *)(uintptr_t)address[i];
        shape[0] = shape[1] = 0;
        shape[2] = is_complete(data, size[i]) ? orientation(data, size[i]) : 0;
        void *handle = shape[2] ? library->init(DECOMPRESS) : NULL;
        if (!handle)
            continue;
        if (!library->read_header(handle, data, (size_t)size[i])) {
            int subsampling = library->get(handle, SUBSAMPLING),
                colorspace = library->get(handle, COLORSPACE);
            if (subsampling >= 0 && subsampling < SUBSAMPLINGS && colorspace >= 0 &&
                colorspace <= 2 &&
                (library->get(handle, PROGRESSIVE) == 0 || has_one_end(data, size[i]))) {
                shape[0] = library->get(handle, HEIGHT);
                shape[1] = library->get(handle, WIDTH);
            }
        }
        library->destroy(handle);
    }
}

/* Results of decoding one image. NO_ROOM: too little scratch memory is left. */
enum { DECODED, FAILED, NO_ROOM };

/* Decode one image of `decode_regions`. *used: bytes of scratch memory in use. */
static int decode_region(const turbo *library, void *handle, const unsigned char *data,
                         int64_t size, const int32_t *box, int turned, int mirrored,
                         unsigned char *out, int64_t height, int64_t width, unsigned char *scratch,
                         int64_t scratch_size, int64_t *used, int64_t *decoded) {
    if (library->read_header(handle, data, (size_t)size))
        return FAILED;
    int subsampling = library->get(handle, SUBSAMPLING);
    int image_height = library->get(handle, HEIGHT), image_width = library->get(handle, WIDTH);
    if (subsampling < 0 || subsampling >= SUBSAMPLINGS)
        return FAILED;
    const int *block = block_sizes[subsampling];
    int top = box[0], left = box[1], bottom = top + box[2] + block[1],
        right = left + box[3] + block[0];
    region part = {(left / block[0] - 1) * block[0], top - block[1], 0, 0};
    part.x = part.x < 0 ? 0 : part.x;
    part.y = part.y < 0 ? 0 : part.y;
    part.width = (right < image_width ? right : image_width) - part.x;
    part.height = (bottom < image_height ? bottom : image_height) - part.y;
    int is_box = part.y == top && part.x == left && part.height == box[2] && part.width == box[3];
    int is_final = is_box && !turned && box[2] == height && box[3] == width,
        is_direct = is_final && !mirrored;
    int64_t bytes = 3 * (int64_t)part.width * part.height;
    if (!is_direct && *used + bytes > scratch_size)
        return NO_ROOM;
    unsigned char *target = is_direct ? out : scratch + *used;
    /* pixel format 0 is RGB, 1 is BGR: reverse_rows makes mirrored RGB of BGR */
    if (library->crop(handle, part) ||
        library->decode(handle, data, (size_t)size, target, 0, mirrored))
        return FAILED;
    decoded[0] = *used;
    decoded[1] = part.y;
    decoded[2] = part.x;
    decoded[3] = is_final ? 0 : part.height;
    decoded[4] = part.width;
    if (is_final && mirrored)
        reverse_rows(out, scratch + *used, height, 3 * width);
    else if (!is_final)
        *used += bytes;
    return DECODED;
}

/* Decode a region of each image. `read_headers` must have accepted the images.
 *
 * box: top, left, height and width of the region in the stored image, 4 numbers for each image.
 * turned: whether the image must be rotated or flipped afterwards. mirrored: whether it must be
 * mirrored.
 * to: address of height x width pixels (RGB) for each image. It is filled, and mirrored where that
 * is set, if the region has this size, is not turned, and needs no pixels around it.
 * scratch: gets the other regions, with one block more on each side. They are BGR where
 * mirrored[i] is set.
 * decoded: 5 numbers for each image: offset in scratch; top, left, height and width of what is
 * there. A height of 0: the pixels are in `to`. -1: libjpeg-turbo failed, or scratch is too small
 * for this image alone.
 * Returns the number of images that were processed: fewer than `count` if scratch is full. */
int64_t decode_regions(const turbo *library, int64_t count, const uint64_t *address,
                       const int64_t *size, const int32_t *box, const uint8_t *turned,
                       const uint8_t *mirrored, const uint64_t *to, int64_t height, int64_t width,
                       unsigned char *scratch, int64_t scratch_size, int64_t *decoded) {
    int64_t used = 0;
    for (int64_t i = 0; i < count; i++, box += 4, decoded += 5) {
        const unsigned char *data = (const unsigned char *)(uintptr_t)address[i];
        unsigned char *out = (unsigned char *)(uintptr_t)to[i];
        decoded[3] = -1;
        void *handle = library->init(DECOMPRESS);
        if (!handle)
            continue;
        int result = decode_region(library, handle, data, size[i], box, turned[i], mirrored[i], out,
                                   height, width, scratch, scratch_size, &used, decoded);
        library->destroy(handle);
        if (result == NO_ROOM && used)
            return i;
    }
    return count;
}
