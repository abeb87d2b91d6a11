/* Arithmetic on whole tensors, in place; included as loops.h is. Each + - * is rounded by itself,
 * in the order of the torch version in elementwise.py. */

/* u <- mu·u + D; phi <- phi - lr·(D + mu·u) */
TARGET static void SET(nesterov)(loose_f32 *phi, const loose_f32 *delta, loose_f32 *momentum,
                                 size_t count, float lr, float mu)
{
    for (size_t i = 0; i < count; i++) {
        float d = delta[i], u = momentum[i] * mu + d;
        momentum[i] = u;
        phi[i] = phi[i] - (u * mu + d) * lr;
    }
}

TARGET static void SET(scale)(const loose_f32 *x, size_t count, float factor, loose_f32 *out)
{
    for (size_t i = 0; i < count; i++)
        out[i] = x[i] * factor;
}

TARGET static void SET(add_scaled)(loose_f32 *sum, const loose_f32 *x, size_t count, float weight)
{
    for (size_t i = 0; i < count; i++)
        sum[i] = sum[i] + x[i] * weight;
}

TARGET static void SET(subtract)(const loose_f32 *a, const loose_f32 *b, size_t count,
                                 loose_f32 *out)
{
    for (size_t i = 0; i < count; i++)
        out[i] = a[i] - b[i];
}
