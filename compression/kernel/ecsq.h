/* ecsq: multiples of a step, as the places, signs and sizes of those that are not 0: ecsq.py.
 * Included as loops.h is. */


/* Count magnitudes by their upper 16 bits, from `base` on; lower ones are counted there. There are
 * several tables, so that two equal values in a row need not wait for each other. */
TARGET static void SET(count_bins)(const loose_f32 *x, size_t count, int32_t base,
                                   uint32_t bins[TABLES][BINS])
{
    const loose_i32 *bits = (const loose_i32 *)x;
    int32_t least_size = base << 16, most_size = least_size + (BINS << 16) - 1;
    uint16_t bin[PIECE];
    if (most_size > LARGEST_BITS)
        most_size = LARGEST_BITS;
    memset(bins, 0, TABLES * sizeof *bins);
    for (size_t at = 0; at < count; at += PIECE) {
        size_t some = least(PIECE, count - at), i = 0;
        for (size_t j = 0; j < some; j++) {
            int32_t size = bits[at + j] & 0x7FFFFFFF;
            size = size > least_size ? size : least_size;
            size = size < most_size ? size : most_size;
            bin[j] = (uint16_t)((uint32_t)(size - least_size) >> 16);
        }
        for (; i + TABLES <= some; i += TABLES)
            for (size_t j = 0; j < TABLES; j++)
                bins[j][bin[i + j]]++;
        for (; i < some; i++)
            bins[0][bin[i]]++;
    }
    for (size_t j = 1; j < TABLES; j++)
        for (size_t i = 0; i < BINS; i++)
            bins[0][i] += bins[j][i];
}

/* The most bits that the lists take at this step if every magnitude were the largest of its bin. */
TARGET static uint64_t SET(bits_at_step)(const uint32_t *bins, int32_t base, int32_t top,
                                         int32_t step, size_t count)
{
    float by = from_bf16((uint16_t)step);
    uint64_t many = 0, few = 0, excess = 0;
    for (int32_t bin = step - BELOW_ONE > base ? step - BELOW_ONE : base; bin <= top; bin++) {
        int32_t code = steps_in(from_bf16((uint16_t)(bin + 1)), by);
        uint64_t here = bins[bin - base];
        many += code > 0 ? here : 0;
        few += code > 1 ? here : 0;
        excess += code > 1 ? here * (uint32_t)(code - 2) : 0;
    }
    return many + rice_max_bits(many, count - many) + rice_max_bits(few, many - few) +
           rice_max_bits(few, excess);
}

/* The smallest step at which the lists are certain to fit, or else the largest; 0 if all values
 * become 0. `most` are the bits of the largest magnitude. */
TARGET static int32_t SET(step_of)(const loose_f32 *x, struct shape s, int32_t most)
{
    uint32_t bins[TABLES][BINS];
    most = most < LARGEST_BITS ? most : LARGEST_BITS;
    int32_t high = bf16_of(float_of(most)), low = high - STEP_RANGE;
    if (high < MIN_STEP)
        return 0;
    low = low > MIN_STEP ? low : MIN_STEP;
    int32_t base = low > BELOW_ONE ? low - BELOW_ONE : 0;
    SET(count_bins)(x, s.count, base, bins);
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (SET(bits_at_step)(bins[0], base, most >> 16, middle, s.count) <=
            (uint64_t)s.count * s.block / 100)
            high = middle;
        else
            low = middle + 1;
    }
    return high;
}

/* The bits of the least magnitude that is at least `code` steps. */
TARGET static int32_t SET(least_with)(int32_t code, float step)
{
    int32_t low = 0, high = INFINITY_BITS;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        float size = float_of(middle < LARGEST_BITS ? middle : LARGEST_BITS);
        if (size / step + ROUND_UP >= (float)code) /* the quotient may be infinite */
            high = middle;
        else
            low = middle;
    }
    return high;
}

/* What the lists say: which values are not 0; of these, which are beyond 1, and their sizes. */
struct SET(codes) {
    uint64_t *nonzero, *spare, *beyond;
    loose_i32 *size;
    size_t many, few;
};

/* Take 64 values: append their signs, and note their codes. */
TARGET static inline void SET(take_word)(const loose_f32 *x, int32_t one, int32_t two,
                                         struct SET(codes) *codes, struct writer *signs,
                                         struct writer *beyond, uint64_t *nonzero)
{
    const loose_i32 *bits = (const loose_i32 *)x;
    uint64_t some = SET(reaching)(bits, one), more = SET(reaching)(bits, two);
    unsigned count = (unsigned)__builtin_popcountll(some);
    *nonzero = some;
    append(signs, EXTRACT(SET(negative)(x), some), count);
    append(beyond, EXTRACT(more, some), count);
    codes->many += count;
    for (; more; more &= more - 1)
        codes->size[codes->few++] = bits[trailing_zeros(more)] & 0x7FFFFFFF;
}

/* Write the signs and note the codes of all values; return the byte after the signs. */
TARGET static uint8_t *SET(take_codes)(const loose_f32 *x, size_t count, float step,
                                       struct SET(codes) *codes, uint8_t *out)
{
    int32_t one = SET(least_with)(1, step), two = SET(least_with)(2, step);
    struct writer signs = {out, 0, 0}, beyond = {(uint8_t *)codes->beyond, 0, 0};
    uint64_t *nonzero = codes->nonzero;
    loose_f32 last[64] = {0};
    for (; count >= 64; count -= 64, x += 64)
        SET(take_word)(x, one, two, codes, &signs, &beyond, nonzero++);
    memcpy(last, x, count * sizeof *last);
    SET(take_word)(last, one, two, codes, &signs, &beyond, nonzero);
    return end_of(signs);
}

/* The stream of these words, up to its last one. */
TARGET static struct SET(stream) SET(trimmed)(uint64_t *bits, size_t words)
{
    while (words && !bits[words - 1])
        words--;
    size_t rest = words ? (size_t)__builtin_clzll(bits[words - 1]) : 0;
    return (struct SET(stream)){bits, 64 * words - rest};
}

/* Replace magnitudes, in place, by their codes beyond 2, as 16-bit numbers; return their sum. */
TARGET static uint64_t SET(excess_of)(loose_i32 *size, size_t count, float step)
{
    loose_u16 *excess = (loose_u16 *)size;
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t bits = size[i] < LARGEST_BITS ? size[i] : LARGEST_BITS;
        excess[i] = (uint16_t)(steps_in(float_of(bits), step) - 2);
        total += excess[i];
    }
    return total;
}

TARGET static size_t SET(encode_ecsq)(const loose_f32 *x, struct shape s, uint8_t *out)
{
    size_t words = s.count / 64 + 1 + SLACK / 8;
    int32_t most = SET(peak)(x, s.count);
    if (most >= INFINITY_BITS)
        return 0;
    uint64_t *room = malloc((3 * words + s.count / 2 + 1 + 16) * sizeof *room);
    struct SET(codes) codes = {room, room + words, room + 2 * words,
                               (loose_i32 *)(room + 3 * words), 0, 0};
    uint16_t step = (uint16_t)SET(step_of)(x, s, most);
    uint8_t *to = out + HEAD;
    if (room && step) {
        to = SET(take_codes)(x, s.count, from_bf16(step), &codes, to);
        to = SET(write_gaps)(SET(trimmed)(codes.nonzero, s.count / 64 + 1), codes.many,
                             codes.spare, to);
        to = SET(write_gaps)(SET(trimmed)(codes.beyond, blocks_of(codes.many, 64)), codes.few,
                             codes.spare, to);
        uint64_t total = SET(excess_of)(codes.size, codes.few, from_bf16(step));
        /* more than the room only if another thread is changing the values */
        if ((size_t)(to - out) + rice_max_bytes(codes.few, total) <= ecsq_max_bytes(s))
            to = SET(write_list)((loose_u16 *)codes.size, codes.few, to);
        else
            to = out;
    }
    free(room);
    if (!room || to == out)
        return 0;
    uint32_t counts[2] = {(uint32_t)codes.many, (uint32_t)codes.few};
    memcpy(out, &step, 2);
    memcpy(out + 2, counts, 8);
    return (size_t)(to - out);
}

/* Write 64 values: 0, or plus or minus one step. */
TARGET static void SET(put_word)(uint64_t nonzero, uint64_t negative, uint32_t step, loose_u32 *out)
{
    for (size_t half = 0; half < 64; half += 32) {
        uint32_t some = (uint32_t)(nonzero >> half), signs = (uint32_t)(negative >> half);
        for (unsigned i = 0; i < 32; i++) {
            uint32_t size = (uint32_t)((int32_t)(some << (31 - i)) >> 31) & step;
            out[half + i] = size | (signs << (31 - i) & 0x80000000);
        }
    }
}

TARGET static void SET(put_codes)(const uint8_t *signs, const uint64_t *nonzero,
                                  const uint64_t *beyond, const loose_u16 *excess, float step,
                                  size_t count, loose_f32 *out)
{
    size_t bit = 0;
    loose_f32 last[64];
    for (size_t at = 0; at < count; at += 64) {
        uint64_t some = nonzero[at / 64];
        unsigned here = (unsigned)__builtin_popcountll(some);
        uint64_t negative = DEPOSIT(bits_from(signs, bit, here), some);
        uint64_t more = DEPOSIT(bits_from((const uint8_t *)beyond, bit, here), some);
        loose_f32 *to = count - at < 64 ? last : out + at;
        SET(put_word)(some, negative, (uint32_t)bits_of(step), (loose_u32 *)to);
        for (; more; more &= more - 1) {
            unsigned place = trailing_zeros(more);
            float size = (float)(*excess++ + 2) * step;
            to[place] = negative >> place & 1 ? -size : size;
        }
        if (to == last)
            memcpy(out + at, last, (count - at) * sizeof *last);
        bit += here;
    }
}

TARGET static bool SET(decode_ecsq)(const uint8_t *in, size_t length, struct shape s,
                                    loose_f32 *out)
{
    uint16_t step;
    uint32_t counts[2];
    if (length < HEAD)
        return false;
    memcpy(&step, in, 2);
    memcpy(counts, in + 2, 8);
    size_t many = counts[0], few = counts[1], words = s.count / 64 + 1 + SLACK / 8;
    const uint8_t *signs = in + HEAD, *end = in + length, *at = signs + blocks_of(many, 8);
    if ((step && (step < MIN_STEP || step > MAX_BF16_BITS)) || few > many || many > s.count ||
        length < HEAD + blocks_of(many, 8) || (many % 8 && at[-1] >> many % 8))
        return false;
    uint64_t *room = calloc(3 * words + few / 4 + 2, sizeof *room);
    uint64_t *nonzero = room, *spare = room + words, *beyond = spare + words;
    loose_u16 *excess = (loose_u16 *)(beyond + words);
    uint32_t most = many ? 1 : 0;
    bool good = room && (at = SET(read_gaps)(at, end, many, s.count, nonzero, spare)) &&
                (at = SET(read_gaps)(at, end, few, many, beyond, spare)) &&
                SET(read_list)(at, end, few, MAX_CODE - 2, excess) == end;
    for (size_t i = 0; good && i < few; i++)
        most = excess[i] + 2u > most ? excess[i] + 2u : most;
    good = good && (float)most * from_bf16(step) <= FLT_MAX;
    if (good)
        SET(put_codes)(signs, nonzero, beyond, excess, from_bf16(step), s.count, out);
    free(room);
    return good;
}
