/* Rice coding of the gaps between the ones of a stream of bits: rice.py. Included as loops.h is.
 *
 * At width 0, the unary parts of the gaps are the stream itself. One width more halves each gap: it
 * drops the 1st, 3rd, 5th ... zero of each run, and a plane of low bits says which runs were odd.
 * So lists are written and read 64 bits at a time, and no gap is ever a number. */

struct SET(stream) {
    uint64_t *bits; /* 0 after the last one */
    size_t length;  /* up to the last one, included */
};

static inline size_t SET(length_of)(struct writer to, const uint64_t *from)
{
    return 8 * (size_t)(to.to - (const uint8_t *)from) + to.fill;
}

/* Halve the gaps of a stream, and append one low bit for each. */
TARGET static struct SET(stream) SET(halve)(struct SET(stream) from, uint64_t *into,
                                            struct writer *plane)
{
    struct writer to = {(uint8_t *)into, 0, 0};
    uint64_t odd = 0; /* 1 if an odd number of zeros came before, in a run that goes on */
    for (size_t at = 0; at < from.length; at += 64) {
        uint64_t ones = from.bits[at / 64], zeros = ~ones;
        /* Adding the start of a run to it clears it. Here, of runs that start at an even place. */
        uint64_t starts = zeros & ~(zeros << 1) & (EVEN_BITS ^ odd);
        uint64_t even = zeros & ~(zeros + starts);
        uint64_t dropped = (even & EVEN_BITS) | (zeros & ~even & ~EVEN_BITS);
        uint64_t kept = ~dropped & low_bits((unsigned)least(64, from.length - at));
        append(&to, EXTRACT(ones, kept), (unsigned)__builtin_popcountll(kept));
        append(plane, EXTRACT(dropped << 1 | odd, ones), (unsigned)__builtin_popcountll(ones));
        odd = dropped >> 63;
    }
    return (struct SET(stream)){into, SET(length_of)(to, into)};
}

/* Write the gaps before the ones of a stream, which is lost; `spare` has room for it. */
TARGET static uint8_t *SET(write_gaps)(struct SET(stream) from, size_t ones, uint64_t *spare,
                                       uint8_t *out)
{
    struct writer planes = {out + 1, 0, 0};
    uint8_t width = 0;
    if (!ones)
        return out;
    for (; width < MAX_WIDTH; width++) {
        struct writer more = planes;
        struct SET(stream) half = SET(halve)(from, spare, &more);
        if (half.length + ones >= from.length)
            break;
        spare = from.bits;
        from = half;
        planes = more;
    }
    *out = width;
    memcpy(planes.to, &planes.held, sizeof planes.held); /* without the plane that did not pay */
    memcpy(end_of(planes), from.bits, blocks_of(from.length, 8));
    return end_of(planes) + blocks_of(from.length, 8);
}

/* Undo `halve`: the low bits begin at bit `bit` of `plane`. The length is above `most` if the
 * stream would be longer. */
TARGET static struct SET(stream) SET(widen)(struct SET(stream) from, const uint8_t *plane,
                                            size_t bit, uint64_t *into, size_t most)
{
    struct writer to = {(uint8_t *)into, 0, 0};
    for (size_t at = 0; at < from.length && SET(length_of)(to, into) <= most; at += 32) {
        uint64_t half = from.bits[at / 64] >> at % 64 & 0xFFFFFFFF;
        uint64_t ones = DEPOSIT(half, ~EVEN_BITS), before = ones >> 1; /* a zero, if it is odd */
        uint64_t odd = DEPOSIT(word_at(plane + bit / 8) >> bit % 8, before);
        uint64_t kept = (~before | odd) & low_bits(2 * (unsigned)least(32, from.length - at));
        append(&to, EXTRACT(ones, kept), (unsigned)__builtin_popcountll(kept));
        bit += (size_t)__builtin_popcountll(half);
    }
    return (struct SET(stream)){into, SET(length_of)(to, into)};
}

/* The number of bits up to the one that is `count`-th, at least the first, or 0 if it is not there
 * or if its byte has another after it. */
TARGET static size_t SET(length_with)(const uint8_t *in, const uint8_t *end, size_t count)
{
    const uint8_t *at = in;
    for (; end - at >= 8; at += 8) {
        size_t ones = (size_t)__builtin_popcountll(word_at(at));
        if (ones >= count)
            break;
        count -= ones;
    }
    for (; at < end; at++) {
        size_t ones = (size_t)__builtin_popcountll(*at);
        if (ones == count)
            return 8 * (size_t)(at - in) + 64 - (size_t)__builtin_clzll(*at);
        if (ones > count)
            return 0;
        count -= ones;
    }
    return 0;
}

/* Read a stream of `ones` ones and `most` bits at most into `into`, with the help of `spare`, both
 * of which have room for it and 0 after it; return the byte after the list, or NULL if no correct
 * encoder wrote it. SLACK bytes of any content may be read after `end`. */
TARGET static const uint8_t *SET(read_gaps)(const uint8_t *in, const uint8_t *end, size_t ones,
                                            size_t most, uint64_t *into, uint64_t *spare)
{
    if (!ones)
        return in;
    size_t room = (size_t)(end - in), width = room ? *in : 0, used = ones * width % 8;
    size_t low = blocks_of(ones * width, 8);
    if (width > MAX_WIDTH || room < 1 + low + blocks_of(ones, 8) || (used && in[low] >> used))
        return NULL;
    const uint8_t *planes = in + 1, *unary = planes + low;
    struct SET(stream) stream = {width % 2 ? spare : into, SET(length_with)(unary, end, ones)};
    const uint8_t *after = unary + blocks_of(stream.length, 8);
    if (!stream.length || stream.length > most)
        return NULL;
    memcpy(stream.bits, unary, (size_t)(after - unary));
    while (width--) {
        uint64_t *other = stream.bits == into ? spare : into;
        stream = SET(widen)(stream, planes, width * ones, other, most);
        if (stream.length > most)
            return NULL;
    }
    memset(into + blocks_of(stream.length, 64), 0,
           8 * (blocks_of(most, 64) - blocks_of(stream.length, 64)));
    return after;
}
