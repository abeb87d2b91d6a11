/* topk2: the largest values of each chunk as gaps, signs and two levels: sparse2.py. Included as
 * loops.h is. */

/* Sort RUN numbers, none below 0: a number's place is the count of those below it. Where several
 * are equal, the places after the first stay empty, and are filled from the left. */
TARGET static void SET(sort_run)(const loose_i32 *x, loose_i32 *sorted)
{
    memset(sorted, 0xFF, RUN * sizeof *sorted);
    for (size_t at = 0; at < RUN; at += 16) {
        int32_t below[16] = {0};
        for (size_t j = 0; j < RUN; j++)
            for (size_t i = 0; i < 16; i++)
                below[i] += x[j] < x[at + i];
        for (size_t i = 0; i < 16; i++)
            sorted[below[i]] = x[at + i];
    }
    for (size_t i = 1; i < RUN; i++)
        sorted[i] = sorted[i] < 0 ? sorted[i - 1] : sorted[i];
}

/* Sort numbers, none below 0: sorted runs are merged to ever longer ones. Both arrays have room for
 * a whole number of runs. */
TARGET static void SET(sort)(loose_i32 *x, size_t count, loose_i32 *spare)
{
    for (size_t i = count; i % RUN; i++)
        x[i] = INT32_MAX;
    for (size_t at = 0; at < count; at += RUN)
        SET(sort_run)(x + at, spare + at);
    memcpy(x, spare, count * sizeof *x);
    for (size_t run = RUN; run < count; run *= 2) {
        for (size_t at = 0; at < count; at += 2 * run) {
            size_t a = at, middle = at + least(run, count - at), b = middle;
            size_t stop = at + least(2 * run, count - at);
            for (size_t i = at; i < stop; i++) {
                bool first = b == stop || (a < middle && x[a] <= x[b]);
                spare[i] = first ? x[a] : x[b];
                a += first;
                b += !first;
            }
        }
        memcpy(x, spare, count * sizeof *x);
    }
}

/* The two means of least squared error of k ascending sizes, as bf16; return the largest size of
 * the lower group. Sums run from the smallest size to the largest. */
TARGET static float SET(two_means)(const loose_f32 *size, size_t k, loose_f64 *below,
                                   loose_u16 *level)
{
    size_t cut = 0;
    double sum = 0, best = -1;
    for (size_t i = 0; i < k; i++)
        below[i] = sum += (double)size[i];
    loose_f64 *gain = below + k;
    for (size_t i = 0; i < k; i++) {
        double above = sum - below[i], high = i + 1 < k ? (double)(int32_t)(k - i - 1) : 1;
        gain[i] = below[i] * below[i] / (double)(int32_t)(i + 1) + above * above / high;
    }
    for (size_t i = 0; i < k; i++)
        if (gain[i] > best) {
            best = gain[i];
            cut = i;
        }
    double high = cut + 1 < k ? (double)(k - cut - 1) : 1;
    level[0] = bf16_of((float)(below[cut] / (double)(cut + 1)));
    level[1] = bf16_of((float)((sum - below[cut]) / high));
    return size[cut];
}

/* Write the levels of the k chosen values of a chunk, and each one's gap and code. */
TARGET static void SET(quantise_chunk)(const loose_f32 *x, size_t k, struct kept kept,
                                       loose_u16 *level, loose_u16 *gap, loose_u16 *code)
{
    int32_t next = 0;
    loose_i32 *size = (loose_i32 *)kept.values;
    for (size_t i = 0; i < k; i++) {
        int32_t place = kept.place[i];
        kept.bits[i] = bits_of(x[place]);
        size[i] = kept.bits[i] & 0x7FFFFFFF;
        gap[i] = (uint16_t)(place - next);
        next = place + 1;
    }
    SET(sort)(size, k, kept.spare);
    int32_t cut = bits_of(SET(two_means)(kept.values, k, kept.sums, level));
    for (size_t i = 0; i < k; i++)
        code[i] = (uint16_t)((uint32_t)kept.bits[i] >> 31) * (kept.bits[i] != INT32_MIN) |
                  (uint16_t)((kept.bits[i] & 0x7FFFFFFF) > cut) << 1;
}

TARGET static size_t SET(encode_topk2)(const loose_f32 *x, struct shape s, uint8_t *out)
{
    size_t total = share_of(s), at = 0;
    struct kept kept = kept_for(s);
    loose_u16 *gap = malloc(2 * (total + 64) * sizeof *gap), *code = gap + total + 64;
    loose_u16 *level = (loose_u16 *)out;
    bool good = kept.place && gap;
    int32_t bound = 0;
    for (size_t start = 0; good && start < s.count; start += s.chunk, level += 2) {
        size_t count = least(s.chunk, s.count - start), k = share_of_chunk(s, count);
        good = SET(choose)(x + start, count, k, &bound, kept);
        if (good)
            SET(quantise_chunk)(x + start, k, kept, level, gap + at, code + at);
        at += k;
    }
    uint8_t *end = good ? end_of(SET(pack)(code, total, 2, (uint8_t *)level)) : out;
    end = good ? SET(write_list)(gap, total, end) : out;
    free(gap);
    free(kept.place);
    return (size_t)(end - out);
}

/* Turn gaps into positions in their chunks; return false if one is outside. */
TARGET static bool SET(place_in_chunks)(loose_u16 *gap, struct shape s)
{
    size_t i = 0;
    for (size_t start = 0; start < s.count; start += s.chunk) {
        size_t count = least(s.chunk, s.count - start), next = 0;
        for (size_t stop = i + share_of_chunk(s, count); i < stop; i++) {
            next += gap[i];
            gap[i] = (uint16_t)next;
            if (next++ >= count)
                return false;
        }
    }
    return true;
}

TARGET static void SET(scatter_chunks)(const loose_u16 *level, const loose_u16 *place,
                                       const loose_u16 *code, struct shape s, loose_f32 *out)
{
    size_t i = 0;
    for (size_t start = 0; start < s.count; start += s.chunk, level += 2) {
        size_t count = least(s.chunk, s.count - start);
        memset(out + start, 0, count * sizeof *out);
        for (size_t stop = i + share_of_chunk(s, count); i < stop; i++) {
            uint32_t bits = (uint32_t)level[code[i] >> 1] << 16 | (uint32_t)code[i] << 31;
            out[start + place[i]] = float_of((int32_t)bits);
        }
    }
}

TARGET static bool SET(decode_topk2)(const uint8_t *in, size_t length, struct shape s,
                                     loose_f32 *out)
{
    size_t total = share_of(s), chunks = blocks_of(s.count, s.chunk);
    size_t list_at = 4 * chunks + blocks_of(total, 4);
    const loose_u16 *level = (const loose_u16 *)in;
    loose_u16 *gap = malloc(2 * (total + 4) * sizeof *gap), *code = gap + total + 4;
    bool good = gap && length >= list_at;
    for (size_t i = 0; good && i < 2 * chunks; i++)
        good = level[i] <= MAX_BF16_BITS;
    good = good && SET(unpack)(in + 4 * chunks, total, 2, code) &&
           SET(read_list)(in + list_at, in + length, total, 65535, gap) == in + length &&
           SET(place_in_chunks)(gap, s);
    if (good)
        SET(scatter_chunks)(level, gap, code, s, out);
    free(gap);
    return good;
}
