/* The loops of plain floats and of blocks. all.h, and so this file, is included once for each
 * instruction set: SET(name) names that set's copy of a function, and TARGET tells the compiler
 * which instructions it may use. This is plain C that the compiler vectorises, except for two masks
 * (USE_AVX2), so one source serves all processors.
 * Every float operation is one that the torch version does too, rounded separately (the build
 * forbids contraction), and all others are on integers, so bytes and values agree to the bit.
 *
 * An encoder returns false if a value is NaN or infinite; its output is then undefined. A decoder
 * returns false if no correct encoder wrote the payload; it has then written nothing.
 */

/* The largest magnitude, as bits: INFINITY_BITS or above if one value is not finite. */
TARGET static int32_t SET(peak)(const loose_f32 *x, size_t count)
{
    const loose_i32 *bits = (const loose_i32 *)x;
    int32_t most = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t magnitude = bits[i] & 0x7FFFFFFF;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

/* --- fp32 --- */

TARGET static bool SET(copy_finite)(const loose_f32 *from, size_t count, loose_f32 *to)
{
    for (size_t at = 0; at < count; at += PIECE) {
        size_t some = least(PIECE, count - at);
        if (SET(peak)(from + at, some) >= INFINITY_BITS)
            return false;
        memcpy(to + at, from + at, some * sizeof *to);
    }
    return true;
}

TARGET static bool SET(encode_fp32)(const loose_f32 *x, struct shape s, uint8_t *out)
{
    return SET(copy_finite)(x, s.count, (loose_f32 *)out);
}

TARGET static bool SET(decode_fp32)(const uint8_t *in, struct shape s, loose_f32 *out)
{
    if (SET(peak)((const loose_f32 *)in, s.count) >= INFINITY_BITS)
        return false;
    memcpy(out, in, s.count * sizeof *out);
    return true;
}

/* --- fp16 and bf16: to the nearest, ties to even, never to infinity --- */

TARGET static bool SET(encode_bf16)(const loose_f32 *x, struct shape s, uint8_t *out)
{
    const loose_i32 *bits = (const loose_i32 *)x;
    loose_u16 *half = (loose_u16 *)out;
    int32_t most = 0;
    for (size_t i = 0; i < s.count; i++) {
        int32_t magnitude = bits[i] & 0x7FFFFFFF;
        most = magnitude > most ? magnitude : most;
        magnitude = magnitude < 0x7F7F0000 ? magnitude : 0x7F7F0000;
        int32_t rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16;
        half[i] = (uint16_t)(rounded | (bits[i] >> 16 & 0x8000));
    }
    return most < INFINITY_BITS;
}

TARGET static bool SET(encode_fp16)(const loose_f32 *x, struct shape s, uint8_t *out)
{
    const loose_i32 *bits = (const loose_i32 *)x;
    loose_u16 *half = (loose_u16 *)out;
    int32_t most = 0;
    for (size_t i = 0; i < s.count; i++) {
        int32_t magnitude = bits[i] & 0x7FFFFFFF;
        most = magnitude > most ? magnitude : most;
        magnitude = magnitude < 0x477FE000 ? magnitude : 0x477FE000; /* 65504 */
        int32_t usual = (magnitude + 0xFFF + (magnitude >> 13 & 1) - 0x38000000) >> 13;
        /* The last bit of 0.5 is worth 2^-24, the smallest half, so the sum is rounded to that. */
        int32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
        /* 0x38800000 is 2^-14, the smallest half that is not denormal. */
        int32_t rounded = magnitude < 0x38800000 ? small : usual;
        half[i] = (uint16_t)(rounded | (bits[i] >> 16 & 0x8000));
    }
    return most < INFINITY_BITS;
}

/* True if all halves are finite: below `infinity` without their sign. */
TARGET static bool SET(halves_are_finite)(const loose_u16 *half, size_t count, int16_t infinity)
{
    int16_t most = 0;
    for (size_t i = 0; i < count; i++) {
        int16_t magnitude = (int16_t)(half[i] & 0x7FFF);
        most = magnitude > most ? magnitude : most;
    }
    return most < infinity;
}

TARGET static bool SET(decode_bf16)(const uint8_t *in, struct shape s, loose_f32 *out)
{
    const loose_u16 *half = (const loose_u16 *)in;
    loose_i32 *bits = (loose_i32 *)out;
    if (!SET(halves_are_finite)(half, s.count, 0x7F80))
        return false;
    for (size_t i = 0; i < s.count; i++)
        bits[i] = (int32_t)((uint32_t)half[i] << 16);
    return true;
}

TARGET static bool SET(decode_fp16)(const uint8_t *in, struct shape s, loose_f32 *out)
{
    const loose_u16 *half = (const loose_u16 *)in;
    loose_i32 *bits = (loose_i32 *)out;
    if (!SET(halves_are_finite)(half, s.count, 0x7C00))
        return false;
    for (size_t i = 0; i < s.count; i++) {
        int32_t magnitude = (half[i] & 0x7FFF) << 13;
        int32_t usual = magnitude + 0x38000000;
        /* Neither operand is denormal, even if the half is. */
        int32_t small = bits_of(float_of(magnitude + 0x38800000) - 0x1p-14f);
        uint32_t sign = (uint32_t)(half[i] & 0x8000) << 16;
        bits[i] = (int32_t)(sign | (uint32_t)(magnitude < 0x00800000 ? small : usual));
    }
    return true;
}

/* --- blocks of codes that share a scale: blocks.py --- */

/* code = round(x / divisor) + zero, ties to even. Adding a small number to ROUND rounds it like
 * that, and leaves the resulting integer in the sum's low bits. */
TARGET static void SET(quantise)(const loose_f32 *x, size_t count, float divisor, float zero,
                                 uint8_t *code)
{
    for (size_t i = 0; i < count; i++)
        code[i] = (uint8_t)bits_of(x[i] / divisor + (ROUND + zero));
}

/* code = 1 + log2 of the nearest power of two to |x / divisor|, plus 8 if negative; 0 below a half.
 * Half an octave, added to the bits, carries into the exponent. */
TARGET static void SET(quantise_powers)(const loose_f32 *x, size_t count, float divisor,
                                        uint8_t *code)
{
    for (size_t i = 0; i < count; i++) {
        int32_t bits = bits_of(x[i] / divisor), size = bits & 0x7FFFFFFF;
        int32_t octave = size - 0x3EC00000; /* 2^-2 · 1.5, which is one code below 0.75 */
        octave = octave > 0x00800000 ? octave : 0x00800000;
        uint32_t stored = (uint32_t)octave | ((uint32_t)bits >> 5 & 0x04000000);
        code[i] = (uint8_t)((size < 0x3F000000 ? 0 : stored) >> 23);
    }
}

/* True if every scale is 0 or within its limits. */
TARGET static bool SET(scales_are_good)(const uint8_t *in, size_t blocks, struct levels levels)
{
    const loose_u32 *bits = (const loose_u32 *)in;
    uint32_t wrong = 0;
    for (size_t k = 0; k < blocks; k++)
        wrong |= bits[k] && bits[k] - MIN_SCALE_BITS > (uint32_t)levels.max_scale - MIN_SCALE_BITS;
    return !wrong;
}

TARGET static bool SET(holds)(const uint8_t *bytes, size_t count, uint8_t wanted)
{
    uint8_t found = 0;
    for (size_t i = 0; i < count; i++)
        found |= bytes[i] == wanted;
    return found;
}

/* Write each block's scale, and one code per value. */
TARGET static bool SET(encode_blocks)(const loose_f32 *x, struct shape s, struct levels levels,
                                      loose_f32 *scale, uint8_t *code)
{
    for (size_t at = 0; at < s.count; at += s.block) {
        size_t some = least(s.block, s.count - at);
        int32_t most = SET(peak)(x + at, some);
        float divisor;
        if (most >= INFINITY_BITS)
            return false;
        *scale++ = scale_of(most, levels, &divisor);
        if (levels.powers)
            SET(quantise_powers)(x + at, some, divisor, code + at);
        else
            SET(quantise)(x + at, some, divisor, levels.zero, code + at);
    }
    return true;
}

TARGET static bool SET(encode_int8)(const loose_f32 *x, struct shape s, uint8_t *out)
{
    uint8_t *code = out + 4 * blocks_of(s.count, s.block);
    return SET(encode_blocks)(x, s, LEVELS_INT8, (loose_f32 *)out, code);
}

TARGET static bool SET(decode_int8)(const uint8_t *in, struct shape s, loose_f32 *out)
{
    size_t blocks = blocks_of(s.count, s.block);
    const loose_f32 *scale = (const loose_f32 *)in;
    const int8_t *code = (const int8_t *)in + 4 * blocks;
    if (!SET(scales_are_good)(in, blocks, LEVELS_INT8) ||
        SET(holds)(in + 4 * blocks, s.count, 0x80))
        return false;
    for (size_t at = 0; at < s.count; at += s.block) {
        size_t stop = at + least(s.block, s.count - at);
        float by = *scale++;
        for (size_t i = at; i < stop; i++)
            out[i] = (float)code[i] * by;
    }
    return true;
}

/* Two codes per byte; an odd last code shares its byte with code 0. */
TARGET static bool SET(encode_pairs)(const loose_f32 *x, struct shape s, struct levels levels,
                                     uint8_t *out)
{
    size_t group = s.block < PIECE ? PIECE / s.block * s.block : s.block;
    loose_f32 *scale = (loose_f32 *)out;
    uint8_t *packed = out + 4 * blocks_of(s.count, s.block), *code = malloc(group);
    bool good = code;
    for (size_t at = 0; good && at < s.count; at += group, packed += group / 2) {
        struct shape part = {least(group, s.count - at), s.block, 0, 0};
        const loose_u16 *pair = (const loose_u16 *)code;
        good = SET(encode_blocks)(x + at, part, levels, scale + at / s.block, code);
        if (part.count % 2)
            code[part.count] = (uint8_t)levels.zero;
        for (size_t i = 0; i < blocks_of(part.count, 2); i++)
            packed[i] = (uint8_t)(pair[i] | pair[i] >> 4);
    }
    free(code);
    return good;
}

TARGET static bool SET(encode_int4)(const loose_f32 *x, struct shape s, uint8_t *out)
{
    return SET(encode_pairs)(x, s, LEVELS_INT4, out);
}

TARGET static bool SET(encode_fp4)(const loose_f32 *x, struct shape s, uint8_t *out)
{
    return SET(encode_pairs)(x, s, LEVELS_FP4, out);
}

/* True if no half of a byte is 0, and the filler, if there is one, is code 0. */
TARGET static bool SET(pairs_are_good)(const uint8_t *packed, size_t count)
{
    uint8_t wrong = 0;
    for (size_t i = 0; i < blocks_of(count, 2); i++)
        wrong |= !(packed[i] & 0x0F) | !(packed[i] & 0xF0);
    return !wrong && (count % 2 == 0 || packed[count / 2] >> 4 == INT4_ZERO);
}

TARGET static bool SET(decode_int4)(const uint8_t *in, struct shape s, loose_f32 *out)
{
    size_t blocks = blocks_of(s.count, s.block);
    const loose_f32 *scale = (const loose_f32 *)in;
    const uint8_t *packed = in + 4 * blocks;
    if (!SET(scales_are_good)(in, blocks, LEVELS_INT4) || !SET(pairs_are_good)(packed, s.count))
        return false;
    for (size_t at = 0; at < s.count; at += s.block) {
        size_t some = least(s.block, s.count - at);
        const uint8_t *pair = packed + at / 2;
        loose_f32 *to = out + at;
        float by = *scale++;
        for (size_t i = 0; i < some / 2; i++) {
            to[2 * i] = (float)((pair[i] & 15) - INT4_ZERO) * by;
            to[2 * i + 1] = (float)((pair[i] >> 4) - INT4_ZERO) * by;
        }
        if (some % 2)
            to[some - 1] = (float)((pair[some / 2] & 15) - INT4_ZERO) * by;
    }
    return true;
}

/* True if no half of a byte is a negative 0, and the filler, if there is one, is 0. */
TARGET static bool SET(powers_are_good)(const uint8_t *packed, size_t count)
{
    uint8_t wrong = 0;
    for (size_t i = 0; i < blocks_of(count, 2); i++)
        wrong |= ((packed[i] & 0x0F) == 0x08) | ((packed[i] & 0xF0) == 0x80);
    return !wrong && (count % 2 == 0 || packed[count / 2] >> 4 == 0);
}

TARGET static bool SET(decode_fp4)(const uint8_t *in, struct shape s, loose_f32 *out)
{
    size_t blocks = blocks_of(s.count, s.block);
    const loose_f32 *scale = (const loose_f32 *)in;
    const uint8_t *packed = in + 4 * blocks;
    if (!SET(scales_are_good)(in, blocks, LEVELS_FP4) || !SET(powers_are_good)(packed, s.count))
        return false;
    for (size_t at = 0; at < s.count; at += s.block) {
        size_t some = least(s.block, s.count - at);
        const uint8_t *pair = packed + at / 2;
        loose_f32 *to = out + at;
        float by = *scale++;
        for (size_t i = 0; i < some / 2; i++) {
            to[2 * i] = power_of(pair[i] & 15) * by;
            to[2 * i + 1] = power_of((uint32_t)pair[i] >> 4) * by;
        }
        if (some % 2)
            to[some - 1] = power_of(pair[some / 2] & 15) * by;
    }
    return true;
}

/* --- sign: one bit per value, and the mean magnitude of each block --- */

/* |x| / divisor in units of 2^-24, rounded to a whole number, ties to even. */
TARGET static inline int32_t SET(unit_of)(float x, float divisor)
{
    float unit = float_of(bits_of(x) & 0x7FFFFFFF) / divisor * 0x1p24f;
    float rounded = unit + 0x1p23f - 0x1p23f;
    return (int32_t)(unit < 0x1p23f ? rounded : unit); /* from there on, all floats are whole */
}

TARGET static uint64_t SET(units)(const loose_f32 *x, size_t count, float divisor)
{
    uint64_t units = 0;
    size_t at = 0;
    for (; count - at >= 64; at += 64) {
        int32_t sum = 0; /* wide enough: no unit is above 2^24 */
        for (size_t i = 0; i < 64; i++)
            sum += SET(unit_of)(x[at + i], divisor);
        units += (uint64_t)sum;
    }
    for (; at < count; at++)
        units += (uint64_t)SET(unit_of)(x[at], divisor);
    return units;
}

TARGET static float SET(mean_magnitude)(const loose_f32 *x, size_t count, float absmax)
{
    uint64_t units = SET(units)(x, count, absmax == 0 ? 1.0f : absmax);
    float mean = (float)((double)units / ((double)count * 0x1p24) * (double)absmax);
    return bits_of(mean) < MIN_SCALE_BITS ? 0.0f : mean;
}

/* Which of 64 values are below 0. */
TARGET static inline uint64_t SET(negative)(const loose_f32 *x)
{
    uint64_t word = 0;
#ifdef USE_AVX2
    for (size_t i = 0; i < 8; i++) {
        __m256 eight = _mm256_loadu_ps((const float *)x + 8 * i);
        eight = _mm256_cmp_ps(eight, _mm256_setzero_ps(), _CMP_LT_OQ);
        word |= (uint64_t)_mm256_movemask_ps(eight) << 8 * i;
    }
#else
    uint8_t below[64];
    for (size_t i = 0; i < 64; i++)
        below[i] = x[i] < 0;
    for (size_t i = 0; i < 8; i++)
        word |= word_at(below + 8 * i) * GATHER >> 56 << 8 * i;
#endif
    return word;
}

TARGET static bool SET(encode_sign)(const loose_f32 *x, struct shape s, uint8_t *out)
{
    loose_f32 *scale = (loose_f32 *)out;
    uint8_t *packed = out + 4 * blocks_of(s.count, s.block);
    for (size_t at = 0; at < s.count; at += s.block) {
        size_t some = least(s.block, s.count - at);
        int32_t most = SET(peak)(x + at, some);
        if (most >= INFINITY_BITS)
            return false;
        *scale++ = SET(mean_magnitude)(x + at, some, float_of(most));
    }
    size_t whole = s.count / 64 * 64, rest = s.count - whole;
    for (size_t at = 0; at < whole; at += 64) {
        uint64_t word = SET(negative)(x + at);
        memcpy(packed + at / 8, &word, sizeof word);
    }
    loose_f32 last[64] = {0};
    memcpy(last, x + whole, rest * sizeof *last);
    uint64_t word = SET(negative)(last);
    memcpy(packed + whole / 8, &word, blocks_of(rest, 8));
    return true;
}

TARGET static bool SET(decode_sign)(const uint8_t *in, struct shape s, loose_f32 *out)
{
    size_t blocks = blocks_of(s.count, s.block);
    const loose_u32 *scale = (const loose_u32 *)in;
    const uint8_t *packed = in + 4 * blocks;
    loose_u32 *to = (loose_u32 *)out;
    if (!SET(scales_are_good)(in, blocks, LEVELS_SIGN) ||
        (s.count % 8 && packed[s.count / 8] >> s.count % 8))
        return false;
    for (size_t at = 0; at < s.count; at += s.block) {
        size_t stop = at + least(s.block, s.count - at), i = at;
        uint32_t by = *scale++;
        for (; i < stop && i % 8; i++)
            to[i] = by ^ (uint32_t)(packed[i / 8] >> i % 8) << 31;
        for (; stop - i >= 32; i += 32) {
            uint32_t word = *(const loose_u32 *)(packed + i / 8);
            for (unsigned j = 0; j < 32; j++)
                to[i + j] = by ^ (word << (31 - j) & 0x80000000);
        }
        for (; i < stop; i++)
            to[i] = by ^ (uint32_t)(packed[i / 8] >> i % 8) << 31;
    }
    return true;
}
