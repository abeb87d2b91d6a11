/* top-k: the largest magnitudes of each chunk; among equal ones, the first. Included as loops.h
 * is. */

TARGET static size_t SET(count_from)(const loose_i32 *bits, size_t count, int32_t least_bits)
{
    int32_t found = 0; /* wide enough: a chunk holds at most 65536 values */
    for (size_t i = 0; i < count; i++)
        found += bits[i] >= least_bits;
    return (size_t)found;
}

TARGET static int32_t SET(lowest)(const loose_i32 *bits, size_t count)
{
    int32_t lowest = INT32_MAX;
    for (size_t i = 0; i < count; i++)
        lowest = bits[i] < lowest ? bits[i] : lowest;
    return lowest;
}

/* Find by bisection a bound that at least k of the numbers reach: either at most k + slack reach
 * it, or fewer than k reach any higher bound. At least k reach `low`, and fewer than k `high`. */
TARGET static int32_t SET(bound_of)(const loose_i32 *bits, size_t count, size_t k, size_t slack,
                                    int32_t low, int32_t high)
{
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        size_t found = SET(count_from)(bits, count, middle);
        if (found >= k)
            low = middle;
        else
            high = middle;
        if (found >= k && found <= k + slack)
            break;
    }
    return low;
}

/* The largest magnitude of each column, where the chunk's values form rows of `columns` values. */
TARGET static void SET(column_peaks)(const loose_f32 *x, size_t count, size_t columns,
                                     loose_i32 *peaks)
{
    const loose_i32 *bits = (const loose_i32 *)x;
    memset(peaks, 0, columns * sizeof *peaks);
    for (size_t start = 0; start < count; start += columns)
        for (size_t i = 0; i < least(columns, count - start); i++) {
            int32_t magnitude = bits[start + i] & 0x7FFFFFFF;
            peaks[i] = magnitude > peaks[i] ? magnitude : peaks[i];
        }
}

/* Which of 64 magnitudes reach a bound. */
TARGET static inline uint64_t SET(reaching)(const loose_i32 *bits, int32_t bound)
{
    uint64_t word = 0;
#ifdef USE_AVX2
    __m256i below = _mm256_set1_epi32(bound - 1), size = _mm256_set1_epi32(0x7FFFFFFF);
    for (size_t i = 0; i < 8; i++) {
        __m256i eight = _mm256_loadu_si256((const __m256i_u *)(bits + 8 * i));
        eight = _mm256_cmpgt_epi32(_mm256_and_si256(eight, size), below);
        word |= (uint64_t)_mm256_movemask_ps(_mm256_castsi256_ps(eight)) << 8 * i;
    }
#else
    uint8_t reach[64];
    for (size_t i = 0; i < 64; i++)
        reach[i] = (bits[i] & 0x7FFFFFFF) >= bound;
    for (size_t i = 0; i < 8; i++)
        word |= word_at(reach + 8 * i) * GATHER >> 56 << 8 * i;
#endif
    return word;
}

/* Places, in ascending order, and magnitudes of all values that reach the bound. */
TARGET static size_t SET(gather)(const loose_f32 *x, size_t count, int32_t bound, struct kept kept)
{
    const loose_i32 *bits = (const loose_i32 *)x;
    size_t found = 0, at = 0;
    for (; count - at >= 64; at += 64) {
        uint64_t word = SET(reaching)(bits + at, bound);
        size_t next = found + (size_t)__builtin_popcountll(word);
        /* Usually a word has few, and a fixed number of steps is easier to predict. */
        for (size_t i = 0; i < FEW; i++, word &= word - 1)
            kept.place[found + i] = (int32_t)(at + trailing_zeros(word));
        for (size_t i = found + FEW; i < next; i++, word &= word - 1)
            kept.place[i] = (int32_t)(at + trailing_zeros(word));
        found = next;
    }
    for (; at < count; at++) {
        kept.place[found] = (int32_t)at;
        found += (bits[at] & 0x7FFFFFFF) >= bound;
    }
    for (size_t i = 0; i < found; i++)
        kept.bits[i] = bits[kept.place[i]] & 0x7FFFFFFF;
    return found;
}

/* Gather at least k values, and not many more; return their number, less than k only if a value is
 * not finite. If the peaks of k columns reach a bound, at least k values do. `bound` is that of the
 * chunk before: where this one is like it, a slightly lower one does, and peaks are not needed. */
TARGET static size_t SET(gather_largest)(const loose_f32 *x, size_t count, size_t k,
                                         int32_t *bound, struct kept kept)
{
    size_t columns = blocks_of(count, blocks_of(count, 4 * k)), found;
    if (*bound > SLIGHTLY) {
        *bound -= SLIGHTLY;
        found = SET(gather)(x, count, *bound, kept);
        if (found >= k && found <= 2 * k)
            return found;
    }
    SET(column_peaks)(x, count, columns, kept.bits);
    int32_t most = SET(peak)((const loose_f32 *)kept.bits, columns);
    if (most >= INFINITY_BITS)
        return 0;
    *bound = SET(lowest)(kept.bits, columns);
    *bound = SET(bound_of)(kept.bits, columns, k, k / 8, *bound, most + 1);
    return SET(gather)(x, count, *bound, kept);
}

/* Put the places of the k largest of `count` values, in ascending order, into kept.place, and set
 * the bound to the least of them; return false if a value is not finite. */
TARGET static bool SET(choose)(const loose_f32 *x, size_t count, size_t k, int32_t *bound,
                               struct kept kept)
{
    size_t found = SET(gather_largest)(x, count, k, bound, kept), taken = 0;
    int32_t most = SET(peak)((const loose_f32 *)kept.bits, found);
    if (found < k || most >= INFINITY_BITS) /* or another thread is changing the values */
        return false;
    *bound = SET(bound_of)(kept.bits, found, k, 0, *bound, most + 1);
    size_t surplus = SET(count_from)(kept.bits, found, *bound) - k;
    for (size_t i = found; surplus; i--) /* of the values equal to the bound, leave out the last */
        if (kept.bits[i - 1] == *bound) {
            kept.bits[i - 1] = -1;
            surplus--;
        }
    for (size_t i = 0; i < found; i++) {
        kept.place[taken] = kept.place[i];
        taken += kept.bits[i] >= *bound;
    }
    return true;
}

TARGET static bool SET(encode_topk)(const loose_f32 *x, struct shape s, uint8_t *out)
{
    struct kept kept = kept_for(s);
    struct stream stream = {out, 0, 0};
    loose_f32 *scale = (loose_f32 *)(out + position_bytes(s));
    uint8_t *code = (uint8_t *)(scale + blocks_of(s.count, s.chunk));
    bool good = kept.place;
    int32_t bound = 0;
    for (size_t start = 0; good && start < s.count; start += s.chunk) {
        size_t count = least(s.chunk, s.count - start), k = least(s.block, count);
        float divisor;
        if (!(good = SET(choose)(x + start, count, k, &bound, kept)))
            break;
        for (size_t i = 0; i < k; i++) {
            put(&stream, (uint32_t)kept.place[i], s.bits);
            kept.values[i] = x[start + (size_t)kept.place[i]];
        }
        *scale++ = scale_of(SET(peak)(kept.values, k), LEVELS_INT8, &divisor);
        SET(quantise)(kept.values, k, divisor, LEVELS_INT8.zero, code);
        code += k;
    }
    put_rest(&stream);
    free(kept.place);
    return good;
}

/* True if positions ascend and stay inside their chunk, and no bit after the last one is set. */
TARGET static bool SET(positions_are_good)(const uint8_t *in, struct shape s)
{
    size_t kept = kept_of(s), i = 0;
    uint32_t wrong = 0;
    for (size_t start = 0; start < s.count; start += s.chunk) {
        size_t count = least(s.chunk, s.count - start);
        uint32_t next = 0;
        for (size_t stop = i + least(s.block, count); i < stop; i++) {
            uint32_t place = position(in, i, s.bits);
            wrong |= (place < next) | (place >= count);
            next = place + 1;
        }
    }
    unsigned rest = kept * s.bits % 8;
    return !wrong && !(rest && in[position_bytes(s) - 1] >> rest);
}

TARGET static bool SET(decode_topk)(const uint8_t *in, struct shape s, loose_f32 *out)
{
    size_t blocks = blocks_of(s.count, s.chunk), i = 0;
    const loose_f32 *scale = (const loose_f32 *)(in + position_bytes(s));
    const uint8_t *code = (const uint8_t *)(scale + blocks);
    if (!SET(scales_are_good)((const uint8_t *)scale, blocks, LEVELS_INT8) ||
        SET(holds)(code, kept_of(s), 0x80))
        return false;
    if (!SET(positions_are_good)(in, s))
        return false;
    for (size_t start = 0; start < s.count; start += s.chunk, scale++) {
        size_t count = least(s.chunk, s.count - start);
        memset(out + start, 0, count * sizeof *out);
        for (size_t stop = i + least(s.block, count); i < stop; i++) {
            size_t place = position(in, i, s.bits);
            if (place < count) /* another thread may be changing the payload */
                out[start + place] = (float)(int8_t)code[i] * *scale;
        }
    }
    return true;
}
